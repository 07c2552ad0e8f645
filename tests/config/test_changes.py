"""Which keys of a config change while its run is running, and to which values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayrft.config import RunConfig, load_config
from rayrft.config.changes import change_config, changeable
from rayrft.errors import ConfigError
from tests.e2e.conftest import small_config


def config(**overrides: Any) -> RunConfig:
    return load_config(small_config(Path("/tmp"), "changed"), overrides)


@pytest.mark.parametrize(
    "changes",
    [
        {"stages.mix.algorithm.mu": 0.05},
        {"stages.1.algorithm.clip_high": 0.3},
        {"stages.mix.optimizer.lr": 1e-5, "stages.mix.optimizer.clip_norm": 0.5},
        {"explorer.sampling.temperature": 0.7},
        {"max_staleness": 4},
        {"buffer.sampler.max_uses": 4, "buffer.sampler.replay_ratio": 3.0},
        {"reward.parts.exact.weight": 2.0, "reward.repetition_penalty": 0.5},
        {"evaluation.temperatures": [0.5], "stages.mix.evaluate_every": 3},
        {"evaluation.max_tokens": 7, "evaluation.enabled": False},
        {"buffer.sampler.name": "priority"},
        {"checkpoint.every": None, "monitor.stall_s": 5.0},
        {"stages.mix.steps": 9},
    ],
)
def test_marked_keys_change_alone(changes: dict[str, Any]) -> None:
    parts = [{"name": "exact"}, {"name": "numeric"}]
    before = config(**{"buffer.sampler.name": "uniform", "buffer.sampler.max_uses": 2, "reward.parts": parts})
    known, after = changeable(before), changeable(change_config(before, changes))
    differing = {key: value for key, value in after.items() if known[key] != value}
    assert differing == {key.replace("stages.1.", "stages.mix."): value for key, value in changes.items()}


@pytest.mark.parametrize(
    ("overrides", "changes", "field"),
    [
        ({}, {"trainer.ranks": 2}, "trainer.ranks"),
        ({}, {"stages.mix.algorithm.kl": "k3"}, "stages.mix.algorithm.kl"),
        ({}, {"buffer.sampler.name": "uniform"}, "buffer.sampler.name"),
        ({"buffer.sampler.name": "uniform"}, {"buffer.sampler.name": "of.mine:draw"}, "buffer.sampler.name"),
        ({"evaluation.enabled": False}, {"evaluation.enabled": True}, "evaluation.enabled"),
        ({}, {"stages.mix.algorithm.mu": 0.0}, "stages.mix.algorithm"),
        ({}, {"stages.mix.algorithm.mu": None}, "stages.mix.algorithm.mu"),
        ({}, {"stages.mix.algorithm.kl_coef": 0.1}, "stages.mix.algorithm.kl_coef"),
        ({}, {"stages.mix.optimizer.lrr": 0.1}, "stages.mix.optimizer.lrr"),
        ({}, {"max_staleness": -1}, "max_staleness"),
        ({}, {"max_staleness": 1, "seed": 3}, "seed"),
        ({"feedback.hold_steps": 1, "max_staleness": 1}, {"max_staleness": 0}, "feedback.hold_steps"),
        (
            {"reward.placement": "pool", "reward.parts": [{"name": "exact"}]},
            {"reward.parts.exact.weight": 2.0},
            "reward.parts.exact.weight",
        ),
        (
            {"stages.mix.algorithm": {"name": "mix", "mu": 0.2, "kl": "k3", "kl_target": 0.1}},
            {"stages.mix.algorithm.kl_coef": 0.1},
            "stages.mix.algorithm.kl_coef",
        ),
    ],
)
def test_a_refused_change_names_its_key(overrides: dict[str, Any], changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        change_config(config(**overrides), changes)
    assert refused.value.field == field and refused.value.problem


def test_a_refusal_says_which_keys_can_change() -> None:
    with pytest.raises(ConfigError, match=r"stages\.\*\.optimizer\.lr") as refused:
        change_config(config(), {"trainer.ranks": 2})
    assert "stop the run, and resume it with the key" in refused.value.remedy
