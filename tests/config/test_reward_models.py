"""Stages that train reward models, and rewards that are those: what is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from rayrft.config import RunConfig, load_config
from rayrft.errors import ConfigError
from tests.config.given import GRPO, base
from tests.errors import about

SFT = {"name": "warmup", "algorithm": {"name": "sft"}, "demonstrations": "expert", "steps": 1, "batch_size": 8}
RM = {**SFT, "name": "rm", "algorithm": {"name": "reward_model", "center": 0.01}, "demonstrations": "pairs"}


def config(*stages: dict[str, Any], **overrides: Any) -> RunConfig:
    demonstrations = {"expert": {"size": 10}, "pairs": {"path": "pairs.jsonl"}}
    raw = {**base(), "stages": list(stages), "storage": "/runs", "demonstrations": demonstrations}
    return load_config({**raw, "reward": {"name": "model", "options": {"stage": "rm"}}}, overrides)


def test_a_reward_names_the_stage_that_trains_it() -> None:
    found = config(SFT, RM, GRPO, **{"reward.options.sigmoid": True})
    assert found.reward.stages == {"rm"} and found.scored_after == 1 and found.scored_demonstrations == {"pairs"}
    assert found.scoring.options == {"sigmoid": True, "model": "/runs/a/checkpoints/rm"}
    assert found.reward.options == {"sigmoid": True, "stage": "rm"}, "the config stays what was given"
    assert (found.stages[1].expert_rows, found.stages[1].groups) == (8, 0)


def test_so_do_parts_and_domains() -> None:
    rm = {"name": "model", "options": {"stage": "rm"}}
    parts = config(RM, GRPO, reward={"parts": [rm, {"name": "exact", "role": "shape"}]})
    assert [part.options for part in parts.scoring.parts] == [{"model": "/runs/a/checkpoints/rm"}, {}]
    domains = config(RM, GRPO, reward={"domains": {"own": rm, "math": {"name": "math"}}})
    assert domains.scoring.models["own"].options == {"model": "/runs/a/checkpoints/rm"}
    assert domains.scoring.models["math"].options == {} and domains.scored_after == 0
    assert config(GRPO, reward={"name": "exact"}).scored_after == -1


@pytest.mark.parametrize(
    ("stages", "overrides", "field"),
    [
        ([GRPO], {}, "reward.options.stage"),
        ([SFT, GRPO], {"reward.options.stage": "warmup"}, "reward.options.stage"),
        ([GRPO, RM], {}, "stages.grpo.algorithm"),
        ([{**SFT, "evaluate_every": 1}, RM, GRPO], {}, "stages.warmup.evaluate_every"),
        ([{**RM, "evaluate_every": 1}, GRPO], {}, "stages.rm.evaluate_every"),
        ([RM, GRPO], {"demonstrations.expert.held_out": 2}, "demonstrations.expert.held_out"),
        ([RM, GRPO], {"demonstrations.pairs.held_out": 2.5}, "demonstrations.pairs.held_out"),
        ([RM, GRPO], {"demonstrations.pairs.held_out": -1}, "demonstrations.pairs.held_out"),
        ([RM, {**GRPO, "start_from": "rm"}], {}, "stages.grpo.start_from"),
        ([RM, {**SFT, "demonstrations": "pairs"}, GRPO], {}, "stages.warmup.demonstrations"),
        ([{**RM, "batch_size": 7}, GRPO], {}, "stages.rm.batch_size"),
        ([RM], {"mode": "train"}, "reward.options.stage"),
        ([{**RM, "algorithm": {"name": "dpo", "reward_model": "bradley_terry"}}], {}, "stages.rm.algorithm.preference"),
        ([{**RM, "algorithm": {"name": "reward_model", "beta": 1.0}}], {}, "stages.rm.algorithm.beta"),
        ([{**RM, "algorithm": {"name": "reward_model", "chosen_coef": 1.0}}], {}, "stages.rm.algorithm.chosen_coef"),
    ],
)
def test_what_cannot_be_is_said(stages: list[dict[str, Any]], overrides: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, check=about(field)):
        config(*stages, **overrides)


def test_a_reward_model_is_evaluated_on_held_out_pairs_alone() -> None:
    found = config(SFT, {**RM, "evaluate_every": 1}, GRPO, **{"demonstrations.pairs.held_out": 0.25})
    assert [found.holds_out(stage) for stage in found.stages] == [False, True, False]


def test_labelled_answers_are_for_the_stages_that_need_labels() -> None:
    kto = {**RM, "name": "kto", "algorithm": {"name": "kto"}, "demonstrations": "rated"}
    rated = {"demonstrations.rated.path": "rated.jsonl", "reward": {"name": "exact"}}
    found = config(kto, GRPO, **rated)
    assert found.labelled_demonstrations == {"rated"} and found.stages[0].expert_rows == 8
    with pytest.raises(ConfigError, check=about("stages.warmup.demonstrations")):
        config(kto, {**SFT, "demonstrations": "rated"}, **rated)
    with pytest.raises(ConfigError, check=about("stages.kto.demonstrations")):
        config({**kto, "demonstrations": None}, **rated)
