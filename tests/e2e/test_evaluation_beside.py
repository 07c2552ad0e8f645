"""Evaluation on engines of its own: steps go on beside it, on the weights that its record says."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

import rayrft
from rayrft.config import load_config
from rayrft.data.task_splits import load_tasks
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.experience import Experience
from rayrft.monitor.records import EvaluationRecord, NoteRecord, Record, StepRecord
from tests.conftest import ROOT
from tests.e2e.conftest import small_config

pytestmark = pytest.mark.slow


class Gate:
    """What `tests/held_open.py` waits for."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._rows: list[Experience] = []

    async def open(self) -> None:
        self._open.set()

    async def passed(self, row: Experience) -> None:
        """Return once the gate is open."""
        self._rows.append(row)
        await self._open.wait()

    async def rows(self) -> list[Experience]:
        return self._rows


def write_tasks(folder: Path) -> dict[str, str]:
    for name, held_out in (("train", False), ("eval", True)):
        words = [f"{name[0]}{first}{last}" for first in "abcde" for last in "abcde"]
        rows = [{"question": f"spell {word}", "answer": word[::-1], "held_out": held_out} for word in words]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"source": "file", "path": str(folder / "train.jsonl"), "eval_path": str(folder / "eval.jsonl")}


Followed = tuple[rayrft.Run, list[Record], list[Experience]]


@pytest.fixture(scope="module")
def run(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Followed:
    """A run whose first evaluation is held open until its fourth step is over, with its records and answers."""
    folder = tmp_path_factory.mktemp("beside")
    gate = ray.remote(Gate).options(name="gate", namespace="tests", max_concurrency=1000, num_cpus=0).remote()
    ray.get(gate.rows.remote())
    stage = {"name": "grpo", "algorithm": {"name": "grpo"}, "steps": 6, "batch_size": 16, "group_size": 4}
    config = small_config(
        folder,
        "beside",
        plugins=[str(ROOT / "tests" / "held_open.py")],
        tasks={"sources": [write_tasks(folder)], "eval_size": 10},
        stages=[{**stage, "evaluate_every": 2, "optimizer": {"lr": 1e-2}}],
        demonstrations={},
        reward={"name": "letters", "truncated": "score"},
        evaluation={"engines": 1, "temperatures": [1.0], "samples": 2, "max_tokens": 4},
        checkpoint={"every": 1, "keep_last": 1, "keep_best": 1},
    )
    config["explorer"]["workflow"] = "held_open"
    started = rayrft.start(config, say=lambda _: None)
    records = []
    for record in started.records():
        records.append(record)
        if isinstance(record, StepRecord) and record.step == 4:
            gate.open.remote()
    started.result()
    rows = ray.get(gate.rows.remote())
    ray.kill(gate)
    return started, records, rows


def test_steps_go_on_while_an_evaluation_is_held_open(run: Followed) -> None:
    _, records, _ = run
    steps = {record.step: index for index, record in enumerate(records) if isinstance(record, StepRecord)}
    first, *_, last = [record for record in records if isinstance(record, EvaluationRecord)]
    assert (first.step, first.version) == (0, 0) and records.index(first) > steps[4]
    assert (last.step, last.version) == (6, 6), "the last one is of the final weights, and waited for"
    assert (last.samples, last.count, last.unknown) == (2, 20, 0) and last.accuracy <= last.passed <= 1
    assert last.mean_tokens <= 4, "evaluation has a limit of its own"
    notes = [record for record in records if isinstance(record, NoteRecord)]
    skipped = [note.step for note in notes if note.text.startswith("no evaluation: that of step 0")]
    assert skipped in ([2], [2, 4])
    assert sum(r.skipped for r in records if isinstance(r, EvaluationRecord)) == len(skipped)


def test_an_evaluation_is_of_the_weights_of_the_version_that_it_says(run: Followed) -> None:
    from transformers import AutoModelForCausalLM

    started, _, rows = run
    changed = []
    for version, folder in ((0, started.folder / "model"), (6, started.folder / "checkpoints" / "final")):
        model = AutoModelForCausalLM.from_pretrained(folder)
        of_version = [row for row in rows if {span.version for span in row.weight_versions} == {version}]
        assert len(of_version) == 20
        for row in of_version:
            ids = torch.tensor(row.token_ids.tolist())[None]
            with torch.no_grad():
                logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
            produced = row.action_mask[1:].astype(bool)
            assert np.abs(logprobs - row.logprobs[1:])[produced].max() < 1e-4
        changed.append(next(model.parameters()).detach())
    assert (changed[1] - changed[0]).abs().max() > 1e-3


def test_the_best_checkpoint_is_that_of_the_step_that_was_evaluated(run: Followed) -> None:
    started, records, _ = run
    accuracy = {r.step: r.accuracy for r in records if isinstance(r, EvaluationRecord)}
    kept = {}
    for manifest in (started.folder / "checkpoints").glob("step-*/manifest.json"):
        progress = json.loads(manifest.read_text())["progress"]
        kept[progress["step"]] = progress["accuracy"]
    assert kept[6] == accuracy[6]
    assert {step: value for step, value in kept.items() if value is not None}.items() <= accuracy.items()


@pytest.mark.slow
def test_a_bench_of_a_checkpoint_gives_the_answers_of_its_weights(run: Followed, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    started, _, _ = run
    found = rayrft.bench(
        started.folder / "config.yaml",
        models={"end": f"{started.folder}@6"},
        say=lambda _: None,
        storage=str(tmp_path),
        **{"explorer.workflow": "single_turn", "bench.temperature": 0, "bench.samples": 1, "bench.k": [1]},
    )
    [score] = found.scores
    assert (score.model, score.taskset, score.evaluation.count) == ("end", "held_out", 10)
    [file] = (found.folder / "attempts" / "end").iterdir()
    final = started.folder / "checkpoints" / "final"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    config = load_config(started.folder / "config.yaml")
    questions = {task.id: task for task in load_tasks(config.tasks, {}, config.seed).evaluation}
    attempted = {attempt["task_id"]: attempt["response"] for attempt in map(json.loads, file.read_text().splitlines())}
    greedy = {}
    for name in attempted:
        prompt = torch.tensor([ChatTokenizer(str(final)).prompt(questions[name].messages)])
        ids = model.generate(prompt, max_new_tokens=6, do_sample=False)[0, prompt.shape[1] :]
        greedy[name] = tokenizer.decode(ids, skip_special_tokens=True)
    assert attempted == greedy and any(greedy.values())
