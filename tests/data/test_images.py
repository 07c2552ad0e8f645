"""Images of tasks and rows: where they stand among the tokens, and what is refused."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rayrft.config import TasksConfig, TaskSourceConfig
from rayrft.data.images import ImageReader, image_paths, insert_images, keep_image
from rayrft.data.task_sources import read_source
from rayrft.data.task_splits import load_tasks
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import DataError, ModelError
from rayrft.experience import Task, from_batch, to_batch
from tests.data.expert_data import jsonl, load, parquet
from tests.errors import about

ASK = [{"role": "user", "content": "Which colour is the square?"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_vision_model: Path) -> Iterator[ChatTokenizer]:
    yield ChatTokenizer(tiny_vision_model)


@pytest.fixture
def pictures(tmp_path: Path) -> tuple[str, ...]:
    """Of several sizes and kinds, in a folder of their own."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    kinds = {"wide.png": ("RGB", (90, 30)), "small.jpg": ("L", (9, 9)), "clear.png": ("RGBA", (40, 64))}
    for name, (mode, size) in kinds.items():
        Image.new(mode, size, 77).save(folder / name)
    return tuple(str(folder / name) for name in kinds)


def by_the_processor(tokenizer: ChatTokenizer, messages: list[dict[str, Any]], images: tuple[str, ...]) -> list[int]:
    """What transformers makes of the same."""
    processor = tokenizer.images.processor
    text = processor.apply_chat_template(insert_images(messages, len(images)), add_generation_prompt=True)
    read = [tokenizer.images.load(path) for path in images]
    return processor(text=[text], images=read, add_special_tokens=False)["input_ids"][0]


def test_a_prompt_has_the_tokens_that_the_models_own_processor_gives(
    tokenizer: ChatTokenizer, pictures: tuple[str, ...]
) -> None:
    marked = [{"role": "user", "content": "Is <image> the <image>, or <image>?"}]
    for messages in (ASK, marked):
        prompt = tokenizer.prompt(messages, pictures)
        assert prompt == by_the_processor(tokenizer, messages, pictures)
    sizes = [tokenizer.images.read(path).tokens for path in pictures]
    assert prompt.count(tokenizer.images.token_id) == sum(sizes) and len(set(sizes)) == 3


def test_one_placeholder_per_image_is_left_for_the_engine_to_repeat(
    tokenizer: ChatTokenizer, pictures: tuple[str, ...]
) -> None:
    prompt = tokenizer.prompt(ASK, pictures)
    collapsed = tokenizer.images.collapse(prompt, pictures)
    assert collapsed.count(tokenizer.images.token_id) == 3
    repeats = tokenizer.images.repeats(collapsed, pictures)
    assert [token for token, count in zip(collapsed, repeats, strict=True) for _ in range(count)] == prompt
    said = [*prompt, tokenizer.images.token_id, 9]  # by the model itself: no image stands there
    assert tokenizer.images.collapse(said, pictures) == [*collapsed, tokenizer.images.token_id, 9]


def test_a_conversation_is_the_prompt_and_the_answer_of_a_rollout(
    tokenizer: ChatTokenizer, pictures: tuple[str, ...]
) -> None:
    ids, mask = tokenizer.chat([*ASK, {"role": "assistant", "content": "red"}], pictures)
    prompt, answer = tokenizer.prompt(ASK, pictures), tokenizer.response("red")
    assert ids == prompt + answer
    assert mask == [0] * len(prompt) + [1] * len(answer)


@pytest.mark.parametrize(
    ("question", "problem"),
    [
        ("<image> or <image>?", "there are 2 marks <image> for 3 images"),
        ("What is <|image_pad|>?", "left 4 places for 3 images"),
    ],
)
def test_places_and_images_must_agree(
    tokenizer: ChatTokenizer, pictures: tuple[str, ...], question: str, problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        tokenizer.prompt([{"role": "user", "content": question}], pictures)


def test_a_text_model_says_that_it_takes_no_images(tiny_model: Path, pictures: tuple[str, ...]) -> None:
    with pytest.raises(ModelError, match=r"model of type 'qwen3' takes none .* Give a model of the Qwen-VL family"):
        ChatTokenizer(tiny_model).prompt(ASK, pictures)


def test_a_file_that_is_no_image_is_named(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    path = tmp_path / "text.png"
    path.write_text("not an image")
    with pytest.raises(DataError, check=about("images")):
        tokenizer.prompt(ASK, (str(path),))


@pytest.mark.parametrize("side", [8193, 20_000])
def test_an_image_of_too_many_pixels_is_refused_by_its_header(side: int, tmp_path: Path) -> None:
    header = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    data += struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    path = tmp_path / "huge.png"
    path.write_bytes(data)
    reader = object.__new__(ImageReader)
    for read in (reader.load, reader.tokens):
        with pytest.raises(DataError, match=r"67108864 pixels.*Scale it down", check=about("images", str(path))):
            read(str(path))
    with pytest.raises(DataError, match="Scale it down", check=about("images", f"{len(data)} bytes")):
        keep_image(data, tmp_path)


def test_an_image_without_a_path_is_kept_once_by_what_it_holds(tmp_path: Path, pictures: tuple[str, ...]) -> None:
    folder = tmp_path / "kept"
    read = Path(pictures[1]).read_bytes()
    drawn = Image.new("RGBA", (20, 30), (255, 0, 0, 255))
    kept = [keep_image(image, folder) for image in (read, read, drawn, drawn.copy())]
    assert kept[0] == kept[1] != kept[2] == kept[3] and sorted(map(str, folder.iterdir())) == sorted({*kept})
    assert kept[0].endswith(".jpeg") and Path(kept[0]).read_bytes() == read
    with Image.open(kept[2]) as image:
        assert (image.size, image.getpixel((0, 0))) == ((20, 30), (255, 0, 0))
    assert keep_image(pictures[0], folder) == keep_image(Path(pictures[0]), folder) == pictures[0]
    with pytest.raises(DataError, check=about("images")):
        keep_image(b"not an image", folder)


def test_pictures_of_pil_and_bytes_are_kept_in_the_folder_named_for_them(
    tmp_path: Path, pictures: tuple[str, ...]
) -> None:
    drawn = Image.open(pictures[0]).convert("RGB")
    [path] = image_paths([drawn], tmp_path, tmp_path / "kept")
    assert Path(path).parent == tmp_path / "kept" and Image.open(path).tobytes() == drawn.tobytes()
    with pytest.raises(DataError, match="images_folder"):
        image_paths([drawn], tmp_path)
    data = Path(pictures[0]).read_bytes()
    images = [{"bytes": data, "path": None}, {"bytes": None, "path": pictures[1]}]
    path = parquet([{"question": "q", "answer": "a", "images": images}], tmp_path)
    source = {"source": "file", "path": path}
    [task] = read_source(TaskSourceConfig(**source, images_folder=tmp_path / "kept"), "tasks.sources.0")
    assert Path(task.images[0]).parent == tmp_path / "kept" and Path(task.images[0]).read_bytes() == data
    assert task.images[1] == pictures[1]
    with pytest.raises(DataError, match="images_folder"):
        read_source(TaskSourceConfig(**source), "tasks.sources.0")


def test_the_same_question_about_other_images_is_another_task(tmp_path: Path) -> None:
    source = {"source": "squares", "path": tmp_path, "size": 40}
    splits = load_tasks(TasksConfig(sources=[source], eval_size=10), {}, seed=0)
    assert (len(splits.train), len(splits.evaluation)) == (30, 10)
    tasks = [*splits.train, *splits.evaluation]
    assert len({task.id for task in tasks}) == len({task.images for task in tasks}) == 40
    assert {task.question for task in tasks} == {ASK[0]["content"]}


def test_images_of_a_task_file_are_found_beside_it(tmp_path: Path, pictures: tuple[str, ...]) -> None:
    rows = [{"question": "q", "answer": "a", "images": ["pictures/wide.png", pictures[1]]}]
    path = jsonl([*rows, {"question": "text only", "answer": "a"}], tmp_path)
    tasks = read_source(TaskSourceConfig(source="file", path=path), "tasks.sources.0")
    assert [task.images for task in tasks] == [pictures[:2], ()]
    jsonl([{**rows[0], "images": ["pictures/none.png"]}], tmp_path)
    with pytest.raises(DataError, check=about("tasks.sources.0.path", 1)):
        read_source(TaskSourceConfig(source="file", path=path), "tasks.sources.0")


def test_demonstrations_keep_their_images(tokenizer: ChatTokenizer, tmp_path: Path, pictures: tuple[str, ...]) -> None:
    rows = [
        {"prompt": "the <image>?", "response": "red", "images": ["pictures/wide.png"]},
        {"prompt": "text only", "response": "yes"},
        {"question": "q", "chosen": "yes", "rejected": "no", "images": list(pictures[:2])},
    ]
    taken, _ = load(jsonl(rows, tmp_path), tokenizer)
    assert [row.images for row in taken] == [pictures[:1], (), pictures[:2], pictures[:2]]
    assert [row.images for row in from_batch(to_batch(taken))] == [row.images for row in taken]
    held_out = {Task.create("s", "q", "a", images=pictures[:2]).dedup_key}
    held_out.add(Task.create("s", "the <image>?", "a").dedup_key)
    taken, left_out = load(jsonl(rows, tmp_path), tokenizer, held_out=held_out)
    assert [row.group_id for row in taken] == ["gold/1", "gold/2"] and left_out.counts == {"held-out question": 1}


def test_parts_of_images_in_demonstrations_are_the_tokens_of_the_models_own_processor(
    tokenizer: ChatTokenizer, tmp_path: Path, pictures: tuple[str, ...]
) -> None:
    url = "data:image/png;base64," + base64.b64encode(Path(pictures[2]).read_bytes()).decode()
    parts = [{"type": "image", "image": "pictures/wide.png"}, {"type": "text", "text": " or "}]
    parts.append({"type": "image_url", "image_url": {"url": url}})
    said = {"role": "assistant", "content": "red"}
    asked = [{"role": "user", "content": parts}]
    pair = {"prompt": asked, "chosen": [said], "rejected": [{**said, "content": "blue"}]}
    path = jsonl([{"messages": [*asked, said]}, pair], tmp_path)
    [row, *sides], _ = load(path, tokenizer, max_length=512, images_folder=tmp_path / "kept")
    assert [side.images for side in sides] == [row.images] * 2
    assert [Path(each).read_bytes() for each in row.images] == [Path(pictures[n]).read_bytes() for n in (0, 2)]
    asked = [{"role": "user", "content": "<image> or <image>"}]
    assert row.token_ids[: row.prompt_length].tolist() == by_the_processor(tokenizer, asked, row.images)


@pytest.mark.parametrize("images", [[{"bytes": "…"}], ["nowhere.png"]])
def test_a_row_with_what_is_no_image_is_broken(tokenizer: ChatTokenizer, tmp_path: Path, images: list[Any]) -> None:
    path = jsonl([{"prompt": "p", "response": "r", "images": images}], tmp_path)
    with pytest.raises(DataError, match=r"line 1: (an image is a dict, not a path|there is no image)"):
        load(path, tokenizer)
