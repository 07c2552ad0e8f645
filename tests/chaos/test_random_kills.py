"""A whole run that is scaled, and killed at random moments, several actors at once, by a number as the seed."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import rayrft
from rayrft.errors import RayrftError
from rayrft.monitor.records import EvaluationRecord, RestartRecord
from tests.chaos.processes import check_steps, final_weights, find, more_steps, new_restarts, recorded, send, until
from tests.e2e.conftest import WITHOUT_VLLM, small_config

KILLS = 20
KINDS = {
    "engines": ("engine-0", "engine-1"),
    "evaluation": ("evaluation-0",),
    "engine_pool": ("engine_pool", "evaluation_pool"),
    "explorer": ("explorer-0", "explorer-1"),
    "trainer": ("rank", "trainer"),
    "buffer": ("buffer",),
    "master": ("master",),
    "reward": ("reward-0", "reward-1"),
    "operators": ("operators-0", "operators-1"),
}


class Reaper:
    """Kills actors of a run: after random numbers of steps, in the middle of a checkpoint, or at any other moment; also
    while others are being restarted."""

    def __init__(self, run: rayrft.Run, seed: int) -> None:
        self._run, self._chance = run, random.Random(seed)
        self.killed = list[str]()
        """Kinds of the actors that were killed."""

    def reap(self) -> None:
        while len(self.killed) < KILLS:
            more_steps(self._run, self._chance.randrange(5))
            if self._chance.random() < 0.3:
                until(self._run, lambda: any(self._run.folder.glob("checkpoints/.step-*.partial")), pause_s=0.001)
            else:
                time.sleep(self._chance.random())  # any moment of a step
            for _ in range(min(self._chance.choice((1, 1, 2, 3)), KILLS - len(self.killed))):
                self._kill()

    def _kill(self) -> None:
        kind = self._chance.choice(list(KINDS))
        self.kill(kind, self._chance.choice(KINDS[kind]))

    def kill(self, kind: str, actor: str) -> None:
        try:
            pid = find(self._run, actor)
        except RayrftError:  # the Master is being restarted
            return
        if send(pid):
            self.killed.append(kind)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("seed", [1])
def test_random_kills_are_survived(seed: int, tmp_path: Path) -> None:
    config: dict[str, Any] = small_config(tmp_path, "random", **WITHOUT_VLLM)
    config["evaluation"] = {"engines": 1, "samples": 1}
    config["reward"] = {"placement": "pool"}
    config["pipelines"] = {"experiences": [{"name": "reward_deviation"}], "actors": {"cpus": 0.1, "memory_gib": 0.25}}
    config["stages"][1] |= {"steps": 10_000, "evaluate_every": 4}
    changes: dict[str, Any] = {
        "explorer.engine.count": 2,
        "explorer.count": 2,
        "trainer.ranks": 2,
        "checkpoint.every": 3,
    }
    changes |= {"restarts.backoff_s": 0}
    run = rayrft.start(config, say=lambda _: None, **changes)
    try:
        more_steps(run, 1)
        assert run.scale(3) == 2
        reaper = Reaper(run, seed)
        reaper.kill("engines", "engine-2")
        new_restarts(run, 0)
        assert run.scale(2) == 3 and "engine-2" not in run.pids()
        reaper.reap()
        more_steps(run, 5)
        run.skip_stage()
        summary = run.result()
    finally:
        run.kill()
    assert summary.status == "finished"
    check_steps(run, summary)
    evaluated = [(each.stage, each.step, each.temperature) for each in recorded(run, EvaluationRecord)]
    assert len({*evaluated}) == len(evaluated) and evaluated[-1][1] == summary.steps
    config |= {"storage": str(tmp_path / "undisturbed")}
    config["stages"][1] |= {"steps": summary.steps - 3}
    undisturbed = rayrft.start(config, say=lambda _: None, **changes)
    assert undisturbed.result().steps == summary.steps and not recorded(undisturbed, RestartRecord)
    assert final_weights(run) == final_weights(undisturbed)
    restarts = recorded(run, RestartRecord)
    assert all(each.seconds > 0 and each.cause for each in restarts)
    killed, counted = Counter(reaper.killed), Counter(each.part for each in restarts)
    assert killed.total() == KILLS and killed.keys() >= counted.keys() - {"trainer"}
    assert {kind: each.count for kind, each in summary.restarts.items()} == counted
    for kind, count in sorted(killed.items()):
        seconds = [record.seconds for record in restarts if record.part == kind] or [float("nan")]
        print(f"{kind}: {count} kills, median {median(seconds):.1f} s, worst {max(seconds):.1f} s")
