"""A bench from its config to its result, killed in between, and repaired; without vLLM, which is not its subject."""

from __future__ import annotations

import json
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import ray

import rayrft
from rayrft.core import engine_groups
from rayrft.explorer.engines.exchange import Completion
from rayrft.runtime.serving import HttpSettings
from rayrft.runtime.serving.applications import applications, start_serve
from tests.e2e.conftest import Call
from tests.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.usefixtures("ray_cluster")


SIZES = {"words": 10, "few": 4}


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two models, on task sets of ten and of four, scored on Ray Serve by a judge on engines of its own."""
    monkeypatch.setattr(engine_groups, "RolloutEngine", ScriptedEngine)
    start_serve(HttpSettings(port=port))  # it has one address in a cluster, and other tests need this one
    return {
        "name": "b",
        "mode": "bench",
        "storage": str(tmp_path / "runs"),
        "model": {"max_length": 64},
        "reward": {"placement": "serve", "name": "tests.rewards.trouble:AsksAnother"},
        "auxiliary": {"grader": {"model": str(tiny_model), "max_length": 300}},
        "explorer": {"sampling": {"max_tokens": 4, "max_prompt_tokens": 50}, "engine": {"count": 1, "max_running": 3}},
        "bench": {
            "models": {"one": str(tiny_model), "two": str(tiny_model)},
            "tasksets": {
                name: {"source": "reasoning_gym", "dataset": "spell_backward", "size": size}
                for name, size in SIZES.items()
            },
            "samples": 3,
            "k": [1, 3],
        },
    }


def dies_once(marker: Path) -> type[ScriptedEngine]:
    """An engine whose process ends at its tenth answer; unless ``marker`` exists, which it writes before."""

    class Dies(ScriptedEngine):
        answered = 0

        def _answer(self, *given: Any) -> Completion:
            self.answered += ray.get_runtime_context().get_actor_name() == "b-bench:engine-0"
            if self.answered == 10 and not marker.exists():
                marker.touch()
                os._exit(1)
            return super()._answer(*given)

    return Dies


@pytest.mark.slow
def test_a_bench_that_was_killed_goes_on_where_it_stopped_and_scores_nothing_twice(
    config: dict[str, Any], command_line: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    whole = rayrft.bench(config, say=said.append)
    assert [line for line in said if "to attempt" in line] == [
        f"{model} on {name}: {size} of {size} tasks to attempt"
        for model in ("one", "two")
        for name, size in SIZES.items()
    ]
    assert {(score.model, score.taskset) for score in whole.scores} == set(product(("one", "two"), SIZES))
    for score in whole.scores:
        found, size = score.evaluation, SIZES[score.taskset]
        # Whatever the judge says, it was asked, and every reward is known.
        assert (found.tasks, found.count, found.samples) == (size, 3 * size, 3)
        assert found.right == found.count and not found.unknown
    for part in ("b-bench:reward ", "b-bench:auxiliary-grader "):
        assert any(line.startswith(part) for line in said[0].splitlines()), said[0]
    assert not applications("b-bench:")
    files = {model: next((whole.folder / "attempts" / model).glob("words-*")) for model in ("one", "two")}
    assert files["one"].name == files["two"].name, "the same weights under the same settings"

    # As if it had been killed while it wrote the fifth attempt of the second model.
    lines = files["two"].read_bytes().splitlines(keepends=True)
    files["two"].write_bytes(b"".join(lines[:4]) + lines[4][:20])
    before, said = files["one"].read_bytes(), []
    monkeypatch.setattr(engine_groups, "RolloutEngine", dies_once(tmp_path / "died"))
    again = rayrft.bench(config, say=said.append)
    attempted = [line for line in said if "to attempt" in line]
    assert attempted == [f"two on words: {left} of 10 tasks to attempt" for left in (9, 6)]
    [death] = [line for line in said if "new actors" in line]
    assert death.startswith("engine-0: "), death
    assert files["one"].read_bytes() == before and files["two"].read_bytes().startswith(b"".join(lines[:4]))
    attempts = [json.loads(line) for line in files["two"].read_text().splitlines()]
    keys = [(attempt["task_id"], attempt["repeat"]) for attempt in attempts]
    assert len(keys) == len(set(keys)) == 30 and {repeat for _, repeat in keys} == {0, 1, 2}

    # With nothing left to do no actor starts; the files are where one asked for them.
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(config))
    told = command_line("bench", str(path), "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png"))
    assert told.returncode == 0 and "to attempt" not in told.stdout, told.stderr
    assert again.table() in told.stdout
    assert (tmp_path / "out.json").read_text() == again.to_json() == (again.folder / "results.json").read_text()
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_that_is_none_is_told_before_anything_starts(
    config: dict[str, Any], command_line: Call, tmp_path: Path
) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(config))
    refused = command_line("bench", str(path), "--model", "three=nobody@7")
    assert refused.returncode == 1 and "bench.models.three: neither a model nor a run" in refused.stderr
    assert "to attempt" not in refused.stdout
