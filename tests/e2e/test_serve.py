"""An application that knows the API of OpenAI alone, and is what a run trains on: real engines, Ray Serve, the official
client."""

from __future__ import annotations

import socket
from typing import Any

import openai
import pytest

import rayrft
from rayrft.buffer.reader import Archive
from rayrft.experience import Experience, from_batch
from rayrft.monitor.records import NoteRecord, StepRecord, read_records
from tests.e2e.conftest import small_config


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


class Application:
    """Talks with the model in sessions of two questions, and says which of two sessions of a task was better."""

    def __init__(self, url: str, key: str) -> None:
        self.client = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=120)
        self.said: dict[str, list[str]] = {}

    def play(self, task: int) -> None:
        for number in range(2):
            session = f"task-{task}/{number}"
            headers = {"X-Session-Id": session, "X-Task-Id": f"task-{task}"}
            messages: list[Any] = [{"role": "user", "content": f"Spell backward: {task}"}]
            first = self.client.chat.completions.create(model="online", messages=messages, extra_headers=headers)
            messages += [first.choices[0].message, {"role": "user", "content": "Again:"}]
            stream = self.client.chat.completions.create(
                model="online", messages=messages, extra_headers=headers, stream=True
            )
            second = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            self.said[session] = [first.choices[0].message.content or "", second]
            body = {"id": session if number else first.id, "reward": float(number)}
            self.client.post("/feedback", cast_to=object, body=body)


def url_of(run: rayrft.Run) -> str:
    for record in run.records():
        if isinstance(record, NoteRecord) and "endpoint at " in record.text:
            return record.text.rpartition("endpoint at ")[2]
    raise AssertionError("the run ended before its endpoint was open")


@pytest.fixture(scope="module")
def served(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[rayrft.Run, Application]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "keys").write_text("secret\n")
    config = small_config(folder, "online", mode="serve", max_staleness=2, evaluation={"enabled": False})
    grpo = {"name": "online", "algorithm": {"name": "grpo"}, "steps": 3, "batch_size": 8, "group_size": 2}
    config |= {"stages": [grpo], "serve": {"port": free_port(), "keys_file": str(folder / "keys")}}
    config["model"]["max_length"] = 96
    run = rayrft.start(config, say=lambda _: None)
    application = Application(url_of(run), "secret")
    with pytest.raises(openai.AuthenticationError):
        Application(str(application.client.base_url), "guessed").play(0)
    for task in range(3 * 4):
        application.play(task)
    assert run.result().status == "finished"
    return run, application


def test_sessions_of_the_application_are_what_the_run_trained_on(served: tuple[rayrft.Run, Application]) -> None:
    run, application = served
    ledger = run.status().ledger
    assert ledger.closes and ledger.trained == 3 * 8
    steps = [record for record in read_records(run.folder) if isinstance(record, StepRecord)]
    assert [step.usual_rows for step in steps] == [8] * 3
    rows: list[Experience] = []
    for batch in Archive.of_run(run.folder).rows(where="group_status = 'trained'"):
        rows += from_batch(batch)
    heard = [[turn["content"] for turn in row.turns if turn["role"] == "assistant"] for row in rows]
    assert sorted(heard) == sorted(application.said.values())
    for row in rows:
        assert row.reward in (0.0, 1.0) and len(row.weight_versions) >= 2
        tokens = sum(span.end - span.start for span in row.weight_versions)
        assert tokens == int(row.action_mask.sum()) and (row.logprobs[row.action_mask == 1] < 0).all()
    assert max(span.version for row in rows for span in row.weight_versions) > 0, "the live policy answered"


def test_the_endpoint_ends_with_its_run(served: tuple[rayrft.Run, Application]) -> None:
    _, application = served
    with pytest.raises((openai.APIConnectionError, openai.NotFoundError)):
        application.client.models.list()
