"""What a bench may be asked for, and what it does without."""

from __future__ import annotations

from typing import Any

import pytest

from rayrft.config import load_config
from rayrft.core.parts.table import plan_placement
from rayrft.errors import ConfigError
from tests.config.given import SPELL, base, bench
from tests.errors import about


def test_a_bench_takes_no_stages_and_starts_no_trainer_or_buffer() -> None:
    config = load_config(bench(), {"explorer.engine.count": 3, "reward.name": "math"})
    counts = {part.name: part.count for part in plan_placement(config)}
    assert counts == {"explorer": 1, "engines": 3, "engine_pool": 1}
    assert config.bench.tasksets["words"].sources[0].dataset == "spell_backward", "one source is a task set"


def test_the_config_of_a_run_is_one_of_a_bench_too() -> None:
    config = load_config(base(), {"mode": "bench", "bench.models.mine": "runs/mine"})
    assert config.bench.models == {"mine": "runs/mine"}
    with pytest.raises(ConfigError, check=about("bench.models")):
        load_config(base(), {"mode": "bench"})


@pytest.mark.parametrize(
    ("given", "samples", "k"),
    [({}, 8, (1, 4, 8)), ({"samples": 4}, 4, (1, 4)), ({"samples": 2}, 2, (1,)), ({"temperature": 0}, 1, (1,))],
)
def test_samples_and_k_follow_from_what_is_given(given: dict[str, Any], samples: int, k: tuple[int, ...]) -> None:
    config = load_config(bench(**given)).bench
    assert (config.samples, config.k) == (samples, k)
    assert load_config(load_config(bench(**given))).bench == config


def test_engines_of_a_bench_take_gpus_without_a_trainer() -> None:
    load_config(bench(), {"explorer.engine.gpus": 2, "explorer.engine.tensor_parallel": 2})
    with pytest.raises(ConfigError, check=about("explorer.engine.gpus", 1.0)):
        load_config(bench(), {"explorer.engine.gpus": 1, "explorer.engine.tensor_parallel": 2})


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ({"bench.samples": 4, "bench.k": [1, 8]}, "bench.k", [1, 8]),
        ({"bench.k": [0, 1]}, "bench.k", [0, 1]),
        ({"bench.temperature": 0, "bench.samples": 8}, "bench.samples", 8),
        ({"bench.models": {"a/b": "x"}}, "bench.models.a/b", "a/b"),
        ({"bench.tasksets": {"held_out": SPELL}}, "bench.tasksets.held_out", "held_out"),
        ({"bench.tasksets": {}}, "bench.tasksets", None),
        ({"bench.max_tokens": 30}, "bench.max_tokens", 30),
        ({"bench.sample": 4}, "bench.sample", "sample"),
        ({"mode": "both"}, "tasks", None),
    ],
)
def test_what_a_bench_cannot_do_is_refused_by_its_key(override: dict[str, Any], field: str, value: Any) -> None:
    with pytest.raises(ConfigError, check=about(field, value)):
        load_config(bench(), override)


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ({"stages": []}, "stages", None),
        ({"model.tiny": None}, "model.path", None),
        ({"evaluation.max_tokens": 30}, "evaluation.max_tokens", 30),
        ({"evaluation.engines": 1, "explorer.engine.gpus": 0.4, "trainer.gpus": 0.6}, "evaluation.engines", 1),
    ],
)
def test_what_a_run_cannot_do_without_is_still_asked_for(override: dict[str, Any], field: str, value: Any) -> None:
    with pytest.raises(ConfigError, check=about(field, value)):
        load_config(base(), override)


def test_engines_that_only_evaluate_are_in_the_plan() -> None:
    parts = {part.name: part for part in plan_placement(load_config(base(), {"evaluation.engines": 2}))}
    assert parts["evaluation"].count == 2 and parts["engine_pool"].count == 2
    for override in ({"evaluation.enabled": False}, {"evaluation.engines": 0}):
        config = load_config(base(), {"evaluation.engines": 2, **override})
        assert "evaluation" not in {part.name for part in plan_placement(config)}
