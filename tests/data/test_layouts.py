"""Layouts of data sets: each is recognised by its columns, read as its own trainer reads it, or refused by name."""

from __future__ import annotations

import base64
import functools
import io
import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from PIL import Image
from tokenizers.processors import TemplateProcessing

from rayrft.config.demonstrations import DemonstrationsConfig
from rayrft.config.tasks import TaskSourceConfig
from rayrft.data.demonstrations import RowEncoder, from_source
from rayrft.data.formats import SkippedRows
from rayrft.data.task_sources import RowsRead, read_source
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import DataError
from rayrft.experience import Experience, Task
from rayrft.trainer.tiny import make_tokenizer
from tests.data.expert_data import Rows, jsonl, parquet

USER = {"role": "user", "content": "What is 2 + 2?"}
ANSWER = {"role": "assistant", "content": "It is 4."}
WRONG = {"role": "assistant", "content": "It is 5."}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TOOLS = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "4"},
    ANSWER,
]
REASONED = [USER, {**ANSWER, "reasoning_content": "2 and 2"}, {"role": "user", "content": "And 1 more?"}, WRONG]

BOS = "<|bos|>"
TEMPLATES = {
    "qwen3": (["<|im_start|>", "<|im_end|>"], "<|im_end|>"),
    "llama3": (["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], "<|eot_id|>"),
    "gemma": (["<start_of_turn>", "<end_of_turn>"], "<end_of_turn>"),
}
"""A template that reasons, one with BOS, and one without system messages, as trl has them."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ChatTokenizer]:
    """Return a tokenizer with one of trl's chat templates."""

    @functools.cache
    def make(template: str) -> ChatTokenizer:
        special, end = TEMPLATES[template.removesuffix("_training")]
        text = resources.files("trl").joinpath(f"chat_templates/{template}.jinja").read_text()
        hf = make_tokenizer([], [], special=[BOS, *special], template=text)
        hf.bos_token, hf.eos_token = BOS, end
        hf.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, hf.convert_tokens_to_ids(BOS))]
        )
        folder = tmp_path_factory.mktemp(template)
        hf.save_pretrained(folder)
        return ChatTokenizer(folder)

    return make


def read(
    row: dict[str, Any] | Rows, tokenizer: ChatTokenizer, folder: Path, **options: Any
) -> tuple[list[Experience], SkippedRows, RowEncoder]:
    labelled = options.pop("labelled", False)
    config = DemonstrationsConfig(path=jsonl(row if isinstance(row, list) else [row], folder), **options)
    encoder = RowEncoder("gold", config, tokenizer, 4096, labelled=labelled)
    return *from_source(encoder), encoder


DEMONSTRATIONS: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "TRL language modelling": ({"text": "It is 4."}, "text → text", ["It is 4.<|im_end|>"]),
    "TRL prompt-completion": (
        {"prompt": "2 + 2 is", "completion": " 4."},
        "prompt → prompt, completion → response",
        [" 4.<|im_end|>"],
    ),
    "TRL prompt-completion of messages": (
        {"prompt": [SYSTEM, USER], "completion": [ANSWER]},
        "prompt → prompt, completion → response",
        ["<think>\n\n</think>\n\nIt is 4.<|im_end|>"],
    ),
    "TRL preference": (
        {"prompt": "2 + 2 is", "chosen": " 4.", "rejected": " 5."},
        "prompt → prompt, chosen → chosen, rejected → rejected",
        [" 4.<|im_end|>", " 5.<|im_end|>"],
    ),
    "TRL preference with an implicit prompt": (
        {"chosen": "2 + 2 is 4.", "rejected": "2 + 2 is 5."},
        "chosen → chosen, rejected → rejected",
        [" 4.<|im_end|>", " 5.<|im_end|>"],
    ),
    "TRL preference with an implicit prompt of messages": (
        {"chosen": [USER, ANSWER], "rejected": [USER, WRONG]},
        "chosen → chosen, rejected → rejected",
        [f"<think>\n\n</think>\n\nIt is {n}.<|im_end|>" for n in (4, 5)],
    ),
    "TRL unpaired preference": (
        {"prompt": "2 + 2 is", "completion": " 4.", "label": True},
        "prompt → prompt, completion → response",
        [" 4.<|im_end|>"],
    ),
    "TRL stepwise supervision": (
        {"prompt": "2 + 2?", "completions": ["2 and 2", "make 5."], "labels": [True, False]},
        "prompt → prompt, completions → steps, labels → step_labels",
        ["2 and 2\n<|im_end|>", "make 5.\n<|im_end|>"],
    ),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "It is 4."}]},
        "conversations → messages",
        ["<think>\n\n</think>\n\nIt is 4.<|im_end|>"],
    ),
    "ShareGPT with calls": (
        {
            "conversations": [
                {"from": "human", "value": "2 + 2?"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": 2}}'},
                {"from": "observation", "value": "4"},
                {"from": "gpt", "value": "It is 4."},
            ],
            "tools": json.dumps([TOOL]),
            "system": "Be brief.",
        },
        "conversations → messages, system → system",
        [
            '<think>\n\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>'
            "<think>\n\n</think>\n\nIt is 4.<|im_end|>"
        ],
    ),
    "ShareGPT preference": (
        {
            "conversations": [{"from": "human", "value": "2 + 2?"}],
            "chosen": {"from": "gpt", "value": "It is 4."},
            "rejected": {"from": "gpt", "value": "It is 5."},
        },
        "conversations → prompt, chosen → chosen, rejected → rejected",
        [f"<think>\n\n</think>\n\nIt is {n}.<|im_end|>" for n in (4, 5)],
    ),
    "Alpaca": (
        {"instruction": "Add.", "input": "2 and 2", "output": "It is 4."},
        "instruction + input → prompt, output → response",
        ["<think>\n\n</think>\n\nIt is 4.<|im_end|>"],
    ),
    "Alpaca with earlier turns": (
        {"instruction": "And 3?", "output": "It is 4.", "history": [["2 and 2?", "5"]], "system": "Be brief."},
        "instruction → prompt, output → response, history → history, system → system",
        ["<think>\n\n</think>\n\nIt is 4.<|im_end|>"],
    ),
    "question and preference": (
        {"system": "Be brief.", "question": "2 + 2?", "chosen": "It is 4.", "rejected": "It is 5."},
        "question → prompt, chosen → chosen, rejected → rejected, system → system",
        [f"<think>\n\n</think>\n\nIt is {n}.<|im_end|>" for n in (4, 5)],
    ),
    "question and preference of Alpaca": (
        {"instruction": "Add.", "input": "2 and 2", "chosen": "It is 4.", "rejected": "It is 5."},
        "instruction + input → prompt, chosen → chosen, rejected → rejected",
        [f"<think>\n\n</think>\n\nIt is {n}.<|im_end|>" for n in (4, 5)],
    ),
    "Dolly": (
        {"instruction": "Add.", "context": "2 and 2", "response": "It is 4.", "category": "sums"},
        "instruction + context → prompt, response → response",
        ["<think>\n\n</think>\n\nIt is 4.<|im_end|>"],
    ),
    "OpenAI preference": (
        {"input": {"messages": [USER]}, "preferred_output": [ANSWER], "non_preferred_output": [WRONG]},
        "input.messages → prompt, preferred_output → chosen, non_preferred_output → rejected",
        [f"<think>\n\n</think>\n\nIt is {n}.<|im_end|>" for n in (4, 5)],
    ),
    "chat messages": (
        {"messages": TOOLS, "tools": [TOOL], "system": "Be brief."},
        "messages → messages, system → system",
        [
            '<think>\n\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>\n'
            '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>'
            "<think>\n\n</think>\n\nIt is 4.<|im_end|>"
        ],
    ),
    "prompt and response": (
        {"prompt": "2 + 2?", "response": "It is 4."},
        "prompt → prompt, response → response",
        ["<think>\n\n</think>\n\nIt is 4.<|im_end|>"],
    ),
    "question and answer": (
        {"question": "2 + 2?", "answer": 1, "choices": ["3", "4"], "system_prompt": "Be brief."},
        "question → prompt, answer → response, choices → choices, system_prompt → system",
        ["<think>\n\n</think>\n\nB<|im_end|>"],
    ),
}


@pytest.mark.parametrize("name", DEMONSTRATIONS)
def test_demonstrations_of_a_known_layout_go_in_as_they_are(
    name: str, tokenizer: Callable[[str], ChatTokenizer], tmp_path: Path
) -> None:
    row, columns, trained = DEMONSTRATIONS[name]
    qwen = tokenizer("qwen3_training" if "tools" in row else "qwen3")
    rows, _, encoder = read(row, qwen, tmp_path)
    assert all((SYSTEM in each.turns) == bool({"system", "system_prompt"} & row.keys()) for each in rows) or isinstance(
        row.get("prompt"), list
    )
    asked = qwen.hf.decode(rows[0].token_ids[rows[0].action_mask == 0])
    assert all(text in asked for text in ("2 and 2?", "5") if "history" in row)
    assert ("2 + 2?\nA. 3\nB. 4" in asked) == ("choices" in row)
    assert [qwen.hf.decode(each.token_ids[each.action_mask == 1]) for each in rows] == trained
    [shown] = encoder.layouts
    layout, _, found = shown.partition(": ")
    assert found == columns and name.startswith(layout.partition(",")[0])
    plain = not any("think" in text for text in trained)
    assert layout.endswith("texts without chat template") == plain


def of_trl(row: dict[str, Any], hf: Any, folder: Path) -> list[tuple[list[int], list[int]]]:
    """Return ids and loss masks that the trainers of trl and their collators make of a row."""
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer
    from trl.chat_template_utils import get_training_chat_template
    from trl.trainer.dpo_trainer import DataCollatorForPreference
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    settings = {"output_dir": str(folder), "max_length": None, "report_to": "none", "use_cpu": True}
    data: Any = datasets.Dataset.from_list([row])
    if "chosen" in row:
        trainer = SimpleNamespace(_tokenizer=hf)
        made = DPOTrainer._prepare_dataset(trainer, data, hf, DPOConfig(**settings), "train")
        batch = DataCollatorForPreference(hf.pad_token_id)([made[0]])
    elif "label" in row:
        trainer = SimpleNamespace(_tokenizer=hf, calculate_KL=False)
        made = KTOTrainer._prepare_dataset(trainer, data, hf, KTOConfig(**settings), "train")
        batch = DataCollatorForUnpairedPreference(hf.pad_token_id)([made[0]])
    else:
        chat = "messages" in row
        template = get_training_chat_template(hf) if chat else None
        trainer = SimpleNamespace(_tokenizer=hf, chat_template=template, completion_only_loss="prompt" in row)
        config = SFTConfig(**settings, assistant_only_loss=chat)
        made = SFTTrainer._prepare_dataset(trainer, data, hf, config, False, None, "train")
        batch = DataCollatorForLanguageModeling(hf.pad_token_id)([made[0]])
        return [(batch["input_ids"][0].tolist(), (batch["labels"][0] != -100).long().tolist())]
    lengths = batch["attention_mask"].sum(1).tolist()
    return [
        (ids[:length], mask[:length])
        for ids, mask, length in zip(
            batch["input_ids"].tolist(), batch["completion_mask"].tolist(), lengths, strict=True
        )
    ]


def as_a_rollout(ids: list[int], mask: list[int], end: int) -> tuple[list[int], list[int]]:
    """Leave out of the loss the first token, which has no probability, and what a template writes between the token
    that ends a turn and the next turn, which no answer contains; and of the row what it writes after the last one."""
    kept, inside = [], True
    mask = [0, *mask[1:]]
    for token, trained in zip(ids, mask, strict=True):
        inside = inside or not trained
        kept.append(int(trained and inside))
        inside = inside and not (trained and token == end)
    last = len(ids) - 1 - ids[::-1].index(end)
    return ids[: last + 1], kept[: last + 1]


OF_TRL: dict[str, dict[str, Any]] = {
    "language modelling": {"text": "What is 2 + 2? It is 4."},
    "conversational language modelling": {"messages": [USER, ANSWER, USER, WRONG]},
    "conversational language modelling with reasoning": {"messages": REASONED},
    "conversational language modelling with tools": {"messages": TOOLS, "tools": [TOOL]},
    "prompt-completion": {"prompt": "What is 2 + 2?", "completion": " It is 4."},
    "conversational prompt-completion": {"prompt": [USER, WRONG, USER], "completion": [ANSWER]},
    "conversational prompt-completion with a system message": {"prompt": [SYSTEM, USER], "completion": [ANSWER]},
    "preference": {"prompt": "What is 2 + 2?", "chosen": " It is 4.", "rejected": " No."},
    "preference with an implicit prompt": {"chosen": "2 + 2 is four.", "rejected": "2 + 2 is five, I think."},
    "conversational preference": {"prompt": [USER], "chosen": [ANSWER], "rejected": [WRONG]},
    "conversational preference with an implicit prompt": {
        "chosen": [USER, WRONG, USER, ANSWER],
        "rejected": [USER, WRONG, USER, {"role": "assistant", "content": "Who knows?"}],
    },
    "unpaired preference": {"prompt": "What is 2 + 2?", "completion": " It is 4.", "label": True},
    "conversational unpaired preference": {"prompt": [USER], "completion": [WRONG], "label": False},
}


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("layout", OF_TRL)
def test_rows_of_trl_become_the_tokens_and_loss_masks_that_trl_makes(
    layout: str, family: str, tokenizer: Callable[[str], ChatTokenizer], tmp_path: Path
) -> None:
    """But for what a template writes after the end of a turn, which trl trains, too."""
    row = OF_TRL[layout]
    if family == "gemma" and any(word in layout for word in ("system", "tools", "reasoning")):
        pytest.skip("the template rejects or ignores such messages")
    if family == "llama3" and any(word in layout for word in ("tools", "reasoning")):
        pytest.skip("the template ignores these fields")
    known = tokenizer(family)
    theirs = of_trl(row, known.hf, tmp_path)
    if "messages" in row:  # trl takes a template with marks of turns then, which the config gives to rayrft
        known = tokenizer(f"{family}_training")
    rows, skipped, _ = read(row, known, tmp_path, labelled="label" in row)
    assert len(skipped) == 0
    ours = [(each.token_ids.tolist(), each.action_mask.tolist()) for each in rows]
    assert ours == [as_a_rollout(ids, mask, known.end_id) for ids, mask in theirs]


def test_arguments_as_json_and_as_objects_are_the_same_call(
    tokenizer: Callable[[str], ChatTokenizer], tmp_path: Path
) -> None:
    """OpenAI's files have JSON with null contents, an Arrow file nulls in every message."""
    text = {"type": "function", "id": "1", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
    openai = [USER, {"role": "assistant", "content": None, "tool_calls": [text, text]}, *TOOLS[2:]]
    openai[2] = {**openai[2], "tool_call_id": "1"}
    qwen = tokenizer("qwen3_training")
    ways = [{"messages": messages, "tools": json.dumps([TOOL])} for messages in (TOOLS, openai)]
    rows, _, _ = read(ways, qwen, tmp_path)
    assert rows[0].token_ids.tolist() == rows[1].token_ids.tolist()
    assert json.loads(rows[0].turns[1]["tool_calls"]) == [CALL, CALL]
    again, _, _ = read([{"messages": list(rows[0].turns), "tools": [TOOL]}], qwen, tmp_path)
    assert again[0].token_ids.tolist() == rows[0].token_ids.tolist(), "an exported row is read as it was"


def test_a_turn_of_weight_0_is_context(tokenizer: Callable[[str], ChatTokenizer], tmp_path: Path) -> None:
    llama = tokenizer("llama3")
    weighted = [USER, {**WRONG, "weight": 0}, USER, {**ANSWER, "weight": 1}]
    [row], _, _ = read({"messages": weighted}, llama, tmp_path)
    assert llama.hf.decode(row.token_ids[row.action_mask == 1]) == "It is 4.<|eot_id|>"
    assert "It is 5." in llama.hf.decode(row.token_ids)
    with pytest.raises(DataError, match="weight 0"):
        read({"messages": [USER, {**ANSWER, "weight": 0}]}, llama, tmp_path)
    with pytest.raises(DataError, match=r"messages\[1\]\.weight is 0\.5"):
        read({"messages": [USER, {**ANSWER, "weight": 0.5}]}, llama, tmp_path)


def test_a_named_column_wins_over_recognition(tokenizer: Callable[[str], ChatTokenizer], tmp_path: Path) -> None:
    llama = tokenizer("llama3")
    row = {"prompt": "2 + 2?", "completion": "It is 4.", "chosen": "yes", "rejected": "no", "q": {"a": "3?"}}
    [named], _, encoder = read(row, llama, tmp_path, prompt="q.a", response="completion", chosen="none")
    assert [turn["content"] for turn in named.turns] == ["3?", "It is 4."]
    assert list(encoder.layouts) == ["prompt and response: q.a → prompt, completion → response"]
    assert "<|start_header_id|>" in llama.hf.decode(named.token_ids)
    [plain], _, _ = read(row, llama, tmp_path, prompt="q.a", response="completion", chosen="none", chat=False)
    assert llama.hf.decode(plain.token_ids) == f"{BOS}3?It is 4.<|eot_id|>"
    chat, _, _ = read(row, llama, tmp_path, chat=True)
    assert all("<|start_header_id|>" in llama.hf.decode(side.token_ids) for side in chat)


def test_a_row_of_no_known_layout_names_its_columns_and_the_nearest_layouts(
    tokenizer: Callable[[str], ChatTokenizer], tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        read({"instruction": "Add.", "input": "2 and 2", "result": "4"}, tokenizer("llama3"), tmp_path)
    said = str(caught.value)
    assert "columns: instruction, input, result" in said
    assert "'Alpaca', which needs output" in said and "'Dolly', which needs response" in said


def test_rows_that_change_their_layout_half_way_are_counted_by_layout(
    tokenizer: Callable[[str], ChatTokenizer], tmp_path: Path
) -> None:
    mixed: Rows = [{"messages": [USER, ANSWER]}] * 3 + [
        {"prompt": "2?", "completion": [ANSWER]},
        {"text": "7"},
        {"x": 1},
    ]
    rows, skipped, encoder = read(mixed, tokenizer("llama3"), tmp_path, on_broken="skip")
    assert len(rows) == 5 and list(skipped.broken) == [6]
    assert sorted(encoder.layouts.values()) == [1, 1, 3]


def png(colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(file, "PNG")
    return file.getvalue()


def test_images_inside_messages_are_those_of_the_row(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(png("red"))
    data = "data:image/png;base64," + base64.b64encode(png("blue")).decode()
    parts = [
        {"type": "text", "text": "Compare "},
        {"type": "image_url", "image_url": {"url": data}},
        {"type": "image", "image": "red.png"},
    ]
    path = jsonl([{"messages": [{"role": "user", "content": parts}], "answer": ["blue", "red"]}], tmp_path)
    [task] = tasks(path=path, images_folder=tmp_path / "kept")
    assert task.question == "Compare <image><image>"
    assert [Path(image).read_bytes() for image in task.images] == [png("blue"), png("red")]
    jsonl([{"messages": [{"role": "user", "content": [parts[1] | {"image_url": "https://there/x.png"}]}]}], tmp_path)
    with pytest.raises(DataError, match="an image on the web"):
        tasks(path=path)
    jsonl([{"messages": [{"role": "user", "content": [{"type": "audio"}]}]}], tmp_path)
    with pytest.raises(DataError, match=r"content\[0\] is of type 'audio'"):
        tasks(path=path)


def tasks(note: list[RowsRead] | None = None, **source: Any) -> list[Task]:
    config = TaskSourceConfig.model_validate(source)
    return read_source(config, "tasks.sources.0", (lambda read: None) if note is None else note.append)


CHAT = [SYSTEM, USER, WRONG, {"role": "user", "content": "Sure?"}]
TASKS: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "verl": (
        {
            "data_source": "openai/gsm8k",
            "prompt": [USER],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {"index": 3},
        },
        ("What is 2 + 2?", "4"),
    ),
    "question and answer": ({"question": "2 + 2?", "answer": 4}, ("2 + 2?", "4")),
    "question and answer with choices": (
        {"question": "2 + 2?", "choices": ["3", "4"], "answer": 1},
        ("2 + 2?\nA. 3\nB. 4", "B"),
    ),
    "question and answer with labelled choices": (
        {"question": "2 + 2?", "choices": {"text": ["3", "4"], "label": ["1", "2"]}, "answerKey": "2"},
        ("2 + 2?\nA. 3\nB. 4", "B"),
    ),
    "question and answer with choices by label": (
        {"question": "2 + 2?", "options": {"X": "3", "Y": "4"}, "answer": ["Y", "3"]},
        ("2 + 2?\nA. 3\nB. 4", "B"),
    ),
    "question and answer with choices in it": (
        {"question": "2 + 2? (A) 3 (B) 4", "options": ["(A)3", "(B)4"], "answer": "4"},
        ("2 + 2? (A) 3 (B) 4", "B"),
    ),
    "problem and answer": ({"problem": "2 + 2?", "solution": "It is 4.", "answer": "4"}, ("2 + 2?", "4")),
    "Alpaca": ({"instruction": "Add.", "input": "2 and 2", "output": "4"}, ("Add.\n\n2 and 2", "4")),
    "Alpaca with earlier turns": (
        {"instruction": "And 3?", "output": "7", "history": [["2 + 2?", "4"]], "system": "Add."},
        ("And 3?", "7"),
    ),
    "TRL prompt-completion": ({"prompt": [USER], "completion": [ANSWER]}, ("What is 2 + 2?", "It is 4.")),
    "TRL prompt-only": ({"prompt": "2 + 2?", "solution": "4"}, ("2 + 2?", "4")),
    "TRL prompt-only of messages": ({"prompt": [SYSTEM, USER]}, ("What is 2 + 2?", "")),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}], "system": "Add."},
        ("2 + 2?", "4"),
    ),
    "chat messages": ({"messages": CHAT, "reference_answer": "yes"}, ("Sure?", "yes")),
}


@pytest.mark.parametrize("write", [jsonl, parquet])
@pytest.mark.parametrize("name", TASKS)
def test_tasks_of_a_known_layout_go_in_as_they_are(
    name: str, write: Callable[[Rows, Path], Path], tmp_path: Path
) -> None:
    row, expected = TASKS[name]
    read: list[RowsRead] = []
    [task] = tasks(read, path=write([row], tmp_path))
    assert (task.question, task.answer) == expected
    assert name.startswith(next(iter(read[0].layouts)).partition(":")[0])
    assert task.system == row.get("system") or "system" not in row
    assert task.other_answers == ("A",) * isinstance(row.get("answer"), list)
    if "history" in row:
        assert [[each["content"] for each in task.history]] == row["history"]
    shown = row.get("prompt", row.get("messages"))
    if isinstance(shown, list):
        assert task.messages == shown, "the model sees the messages of the row"
    assert {key: value for key, value in task.metadata.items() if key in ("data_source", "extra_info")} == {
        key: row[key] for key in ("data_source", "extra_info") if key in row
    }


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "Who?", "answer": "I", "context": "I did it."}, "does not read 'context'"),
        ({"question": "Who?", "answer": True, "passage": "I did it."}, "does not read 'passage'"),
        ({"question": "Who?", "answer": "I", "image": "a.png"}, "does not read 'image'"),
        ({"prompt": "Who?", "completion": "I", "input": "I did it."}, "does not read 'input'"),
        ({"question": "Who?", "answer": 2, "choices": ["I", "you"]}, "not a number from 0 of its 2 choices"),
        ({"question": "Who?", "answer": "1", "choices": ["I", "you"]}, "not a number from 0 of its 2 choices"),
        ({"question": "Who?", "answer": True, "choices": ["I", "you"]}, "not a number from 0 of its 2 choices"),
        ({"question": "Who?", "answer": "I", "choices": "I or you"}, "'choices' is not a list"),
        (
            {"question": "Who?", "answer": "you", "choices": {"text": ["I", "you"], "label": ["1"]}},
            "as many as there are",
        ),
        ({"question": "Who?", "answer": "you", "choices": {"text": ["I", "you"], "label": 2}}, "as many as there are"),
        ({"messages": [SYSTEM, USER, ANSWER], "system": "Be long."}, "has a system message, and so have its messages"),
        ({"instruction": "Who?", "output": "I", "history": ["you?"]}, "'history' is not a list of pairs"),
        ({"messages": [USER, {"role": "critic", "content": "No."}, ANSWER]}, "has the role 'critic'"),
    ],
)
def test_a_column_or_role_with_content_that_is_not_read_is_refused_by_name(
    row: dict[str, Any], problem: str, tokenizer: Callable[[str], ChatTokenizer], tmp_path: Path
) -> None:
    path = jsonl([row], tmp_path)
    with pytest.raises(DataError, match=problem):
        tasks(path=path)
    with pytest.raises(DataError, match=problem):
        read(row, tokenizer("qwen3"), tmp_path)
    if "context" in row:
        assert tasks(path=path, question="question")[0].question == "Who?", "a named column wins"


@pytest.mark.parametrize("lost", [{"system": "Be brief."}, {"tools": [TOOL]}, {"images": ["a.png"]}])
def test_texts_without_chat_template_have_no_place_for_other_content(
    lost: dict[str, Any], tokenizer: Callable[[str], ChatTokenizer], tmp_path: Path
) -> None:
    row = {"prompt": "2 + 2 is", "completion": " 4.", **lost}
    for texts in (row, {"text": "2 + 2 is 4.", **lost}):
        with pytest.raises(DataError, match=r"does not read|no system message"):
            read(texts, tokenizer("qwen3"), tmp_path)
    if "system" in lost:
        assert SYSTEM in read(row, tokenizer("qwen3"), tmp_path, chat=True)[0][0].turns


def test_a_list_of_answers_holds_right_ones_and_rows_without_any_among_others_are_broken(tmp_path: Path) -> None:
    path = jsonl([{"question": "2 + 2?", "answer": ["4", 4.0, "four"]}, {"question": "3?", "answer": []}], tmp_path)
    with pytest.raises(DataError, match="no answer, which other rows have"):
        tasks(path=path)
    [task] = tasks(path=path, on_broken="skip")
    assert (task.answer, task.other_answers) == ("4", ("4.0", "four"))
    with pytest.raises(DataError, match=r"'answer' is an object.*answer\.target"):
        tasks(path=jsonl([{"question": "2 + 2?", "answer": {"target": 4}}], tmp_path))


def test_a_prompt_that_does_not_end_with_the_user_is_refused(tmp_path: Path) -> None:
    for wrong in ([USER, ANSWER, {"role": "tool", "content": "4"}], [SYSTEM], [USER, SYSTEM, USER]):
        with pytest.raises(DataError, match="not a prompt that ends with the user"):
            tasks(path=jsonl([{"messages": wrong, "answer": "4"}], tmp_path))
