"""The algorithm of a stage: pieces and coefficients in YAML, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rayrft.algorithms import build, presets
from rayrft.config import StageConfig, dump_config, load_config
from rayrft.errors import ConfigError
from tests.config.given import base
from tests.errors import about

STAGE = {"name": "s", "steps": 1, "batch_size": 40, "group_size": 8}


def stage(algorithm: dict[str, Any], **changes: Any) -> StageConfig:
    return load_config({**base(), "stages": [{**STAGE, "algorithm": algorithm, **changes}]}).stages[0]


def test_every_piece_and_coefficient_can_be_given() -> None:
    pieces = {"policy_loss": "gspo", "clip_low": 0.01, "entropy": "bonus", "entropy_coef": 0.002}
    algorithm = stage({"name": "grpo", **pieces}).algorithm.build()
    assert (algorithm.policy_loss, algorithm.entropy, algorithm.entropy_coef) == ("gspo", "bonus", 0.002)
    assert algorithm.coefficients == {"clip_low": 0.01}


def test_an_algorithm_is_built_once() -> None:
    first, second = (stage({"name": "grpo", "clip_low": 0.01}).algorithm for _ in range(2))
    assert first.build() is second.build() and stage({"name": "grpo"}).algorithm.build() != first.build()


def test_chord_takes_its_share_of_expert_rows_as_mix_does() -> None:
    chord = {"name": "chord_mu", "mu_peak": 0.5}
    found = stage(chord, expert_share=0.2, demonstrations="expert")
    assert (found.expert_rows, found.groups) == (8, 4)
    with pytest.raises(ConfigError, check=about("stages.s.expert_share")):
        stage(chord, demonstrations="expert")


@pytest.mark.parametrize(
    ("algorithm", "changes", "field"),
    [
        ({"name": "grpo", "clip_lo": 0.1}, {}, "algorithm.clip_lo"),
        ({"name": "grpo", "tau": 0.1}, {}, "algorithm.tau"),
        ({"name": "grpo", "policy_loss": "gpso"}, {}, "algorithm.policy_loss"),
        ({"name": "distill"}, {}, "teacher"),
        ({"name": "jsd"}, {}, "teacher"),
        ({"name": "dpo"}, {}, "demonstrations"),
        ({}, {}, "algorithm.name"),
        ({"name": "grpo"}, {"update": {"critic_warmup_steps": 1}}, "update.critic_warmup_steps"),
        ({"name": "grpo"}, {"critic_optimizer": {"lr": 1e-3}}, "critic_optimizer"),
        ({"name": "ppo"}, {"steps": 5, "update": {"critic_warmup_steps": 5}}, "update.critic_warmup_steps"),
        ({"name": "grpo"}, {"update": {"reference_refresh": 3}}, "update.reference_refresh"),
        ({"name": "grpo", "kl": "k3"}, {"update": {"reset_optimizer": True}}, "update.reset_optimizer"),
    ],
)
def test_what_fails_or_has_no_effect_is_refused(algorithm: dict[str, Any], changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, check=about(f"stages.s.{field}")):
        stage(algorithm, **changes)


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo", "gspo", "red_drop", "reinforce_pp_baseline", "gigpo"])
def test_one_answer_to_a_task_is_refused_where_answers_are_compared(name: str) -> None:
    with pytest.raises(ConfigError, check=about("stages.s.group_size", 1)):
        stage({"name": name}, group_size=1)


@pytest.mark.parametrize("name", ["reinforce_pp", "remax", "ppo", "raft"])
def test_one_answer_to_a_task_is_enough_where_they_are_not(name: str) -> None:
    assert stage({"name": name}, group_size=1).groups == 40


def test_the_longest_answer_is_that_of_the_sampling() -> None:
    assert stage({"name": "dr_grpo"}).algorithm.build().coefficients == {"constant_length": 8}
    given = {"name": "mix", "sft_aggregation": "constant", "constant_length": 100}
    mixed = stage(given, expert_share=0.2, demonstrations="expert").algorithm.build()
    assert mixed.coefficients["constant_length"] == 100
    config = load_config({**base(), "stages": [{**STAGE, "algorithm": {"name": "dr_grpo"}}]})
    assert load_config(yaml.safe_load(dump_config(config))) == config
    with pytest.raises(ConfigError, check=about("stages.s.algorithm.constant_length")):
        load_config({**base(), "mode": "train", "stages": [{**STAGE, "algorithm": {"name": "dr_grpo"}}]})


def test_a_teacher_is_given_where_there_is_distillation_and_nowhere_else(tmp_path: Path) -> None:
    assert stage({"name": "jsd", "teacher_candidates": 8}, teacher="some/model").teacher == "some/model"
    undistilled = {"name": "distill", "distillation_coef": 0.0, "advantage": "grpo", "policy_loss": "ppo"}
    for algorithm in ({"name": "grpo"}, undistilled):
        with pytest.raises(ConfigError, check=about("stages.s.teacher", "some/model")):
            stage(algorithm, teacher="some/model")


def test_a_teachers_folder_is_found_from_any_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "teacher").mkdir()
    monkeypatch.chdir(tmp_path)
    assert stage({"name": "distill"}, teacher="teacher").teacher == str(tmp_path / "teacher")


@pytest.mark.parametrize("name", [name for name in presets if name not in ("distill", "jsd")])
def test_every_preset_can_be_a_stage_and_own_rows_alone_take_the_whole_batch(name: str) -> None:
    expert = {"demonstrations": "expert", **({"expert_share": 0.2} if build(name).mixes else {})}
    needs_expert = {"expert", "pairs"} & build(name).needs.keys()
    found = stage({"name": name}, **expert if needs_expert else {})
    assert bool(found.expert_rows) == bool(needs_expert) and (needs_expert or found.groups == 5)


def test_a_term_of_weight_0_is_served_by_any_run() -> None:
    assert stage({"name": "grpo", "kl": "k3", "kl_coef": 0}).groups == 5
