"""Two Explorers share the tasks of a run, an auxiliary model plays the user, and an application asks the policy."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import openai
import pytest

import rayrft
from rayrft.buffer.reader import Archive
from rayrft.errors import ActorDied, FeedbackRefused
from rayrft.experience import from_batch
from rayrft.monitor.records import StepRecord
from rayrft.monitor.summary import read_summary
from tests.e2e.conftest import WITHOUT_VLLM, endpoint_of, small_config
from tests.errors import about


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_two_explorers_take_each_task_once_beside_an_endpoint_and_a_dead_auxiliary_engine_ends_the_run(
    tmp_path: Path, tiny_model: Path, port: int
) -> None:
    changes: dict[str, Any] = {"evaluation": {"temperatures": [0.0]}, "max_staleness": 1, "monitor": {"stall_s": 300}}
    config = small_config(tmp_path, "shared", **WITHOUT_VLLM, **changes)
    config["model"]["max_length"] = 300
    config["tasks"]["epochs"] = 1
    config["explorer"] |= {"count": 2, "workflow": "user_simulator"}
    config["auxiliary"] = {"user": {"model": str(tiny_model), "max_tokens": 4, "max_length": 300}}
    config |= {"serve": {"port": port}, "restarts": {"per_hour": 0}}
    config["stages"] = [{**config["stages"][1], "steps": 10_000, "batch_size": 20}]
    run = rayrft.start(config)
    for record in run.records():
        if isinstance(record, StepRecord) and record.step == 4:
            break
    with openai.OpenAI(base_url=endpoint_of(run), api_key="none is needed") as client:
        asked = [{"role": "user", "content": "Spell this word backward: cat"}]
        said = client.completions.create(model="shared", prompt="Spell", max_tokens=3)
        answers = [client.chat.completions.create(model="shared", messages=asked, user=f"s-{n}") for n in range(2)]
    assert said.usage and 1 <= said.usage.completion_tokens <= 3 and all(answer.choices for answer in answers)
    run.reward("s-0", 1.0)
    with pytest.raises(FeedbackRefused):
        run.reward("s-0", 0.0)
    os.kill(run.pids()["auxiliary-user-0"], signal.SIGKILL)
    with pytest.raises(ActorDied, check=about("auxiliary-user-0")):
        run.result()
    summary = read_summary(run.folder)
    assert summary is not None and summary.ledger is not None and summary.ledger.closes
    rows = [row for batch in Archive.of_run(run.folder).rows() for row in from_batch(batch)]
    groups = {row.group_id: row.task_id for row in rows}
    assert len(groups) >= 16 and len(set(groups.values())) == len(groups), "a task was handed out twice"
    turns = [[turn["role"] for turn in row.turns] for row in rows]
    assert ["user", "assistant", "user", "assistant"] in turns
    journal = (run.folder / "buffer" / "journal-00000000.jsonl").read_text().splitlines()
    events = [json.loads(line[line.index("{") : line.rindex("}") + 1]) for line in journal]
    takers = {event["producer"] for event in events if event["event"] == "tickets_issued" and event["tasks"]}
    assert len(takers) == 2, "both have acted"
