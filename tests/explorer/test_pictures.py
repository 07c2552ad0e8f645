"""Pictures that a workflow shows as it goes on reach engine and row, in whatever form they are given."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from rayrft.data.tokenizer import ChatTokenizer
from rayrft.experience import Experience, Task
from rayrft.explorer.engines.exchange import Completion, Request, Session
from rayrft.explorer.environments import EnvironmentClient
from rayrft.explorer.rollout import Runner
from rayrft.explorer.trajectory import Model, Trajectory
from rayrft.explorer.workflows import register_workflow
from tests.explorer.scripted import config, full_marks

Shown = tuple[Experience, "Engines", ChatTokenizer]


@register_workflow("slides")
class Slides:
    """Shows a picture with every question: a path, then one of PIL's, then bytes, then two at once."""

    async def run(self, task: Task, model: Model, env: EnvironmentClient | None = None) -> Trajectory:
        trajectory = model.start(task.messages, task.images)
        await trajectory.act()
        drawn = [Image.new("RGB", (16, height), "red") for height in (16, 32, 48)]
        trajectory.observe("And this?", [drawn[0]])
        await trajectory.act()
        data = io.BytesIO()
        drawn[1].save(data, "JPEG")
        trajectory.observe("Is <image> the same?", [data.getvalue()])
        await trajectory.act()
        for _ in range(99):
            trajectory.observe("<image> or <image>?", [task.images[0], drawn[2]])
            await trajectory.act()
        return trajectory


class Engines:
    """Answers with one word."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.answer = tuple(tokenizer.response("r"))
        self.requests: list[Request] = []

    async def generate(self, request: Request, sessions: Sequence[Session] = ()) -> list[Completion]:
        self.requests.append(request)
        size = len(self.answer)
        return [Completion(self.answer, (-1.0,) * size, ((0, size, 0),), "stop")] * request.n


@pytest.fixture
async def shown(tiny_vision_model: Path, squares: list[Task], tmp_path: Path) -> Shown:
    settings = config(
        **{
            "storage": str(tmp_path),
            "explorer.workflow": "slides",
            "model.max_length": 220,
            "explorer.sampling.max_prompt_tokens": 100,
        }
    )
    tokenizer = ChatTokenizer(tiny_vision_model)
    engines = Engines(tokenizer)
    rollout = await Runner(settings, tokenizer, engines, full_marks).run(squares[0], "group", 1, 1.0)
    [row] = rollout.rows
    return row, engines, tokenizer


async def test_pictures_of_all_kinds_reach_the_engine_and_the_row(shown: Shown, tmp_path: Path) -> None:
    row, engines, tokenizer = shown
    assert [len(request.images) for request in engines.requests][:4] == [1, 2, 3, 5]
    ids, mask = row.token_ids.tolist(), row.action_mask.tolist()
    for request in engines.requests:
        size = len(request.prompt)
        assert ids[:size] == request.prompt, "the prefix property"
        places = sum(tokenizer.images.tokens(path) for path in request.images)
        assert request.prompt.count(tokenizer.images.token_id) == places
        assert tuple(ids[size : size + len(engines.answer)]) == engines.answer
    assert sum(mask) == len(engines.requests) * len(engines.answer), "no token of a picture is an action"
    kept = [Path(path) for path in row.images if Path(path).is_relative_to(tmp_path)]
    assert len({*kept}) == 3 and all(path.is_file() for path in kept), "equal pictures are one file of the run"


async def test_an_answer_with_the_token_of_an_image_is_the_last_one(
    tiny_vision_model: Path, squares: list[Task], tmp_path: Path
) -> None:
    """A prompt with it could not be told from one with another image."""
    tokenizer = ChatTokenizer(tiny_vision_model)
    engines = Engines(tokenizer)
    engines.answer = (tokenizer.images.token_id, *engines.answer)

    settings = config(**{"storage": str(tmp_path), "explorer.workflow": "slides", "model.max_length": 220})
    [row] = (await Runner(settings, tokenizer, engines, full_marks).run(squares[0], "group", 1, 1.0)).rows
    assert len(engines.requests) == 1 and row.stop_reason == "length" and len(row.images) == 1


async def test_pictures_after_the_last_answer_are_no_part_of_the_row(
    shown: Shown,
) -> None:
    row, _, tokenizer = shown
    assert row.stop_reason == "length"
    places = sum(tokenizer.images.tokens(path) for path in row.images)
    assert row.token_ids.tolist().count(tokenizer.images.token_id) == places
