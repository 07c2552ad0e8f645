"""What a bench, a job at a named Buffer and stages of reward models may be configured with, and do without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayrft.config import RunConfig, load_config
from rayrft.core.parts.table import plan_placement
from rayrft.errors import ConfigError
from tests.config.given import GRPO, SPELL, base, bench
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


def test_engines_that_only_evaluate_are_in_the_plan() -> None:
    parts = {part.name: part for part in plan_placement(load_config(base(), {"evaluation.engines": 2}))}
    assert parts["evaluation"].count == 2 and parts["engine_pool"].count == 2
    for override in ({"evaluation.enabled": False}, {"evaluation.engines": 0}):
        config = load_config(base(), {"evaluation.engines": 2, **override})
        assert "evaluation" not in {part.name for part in plan_placement(config)}


EXPLORE = {"mode": "explore", "buffer.name": "lake"}


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"mode": "explore"}, "buffer.name"),
        ({"buffer.name": "lake"}, "buffer.name"),
        ({"buffer.max_age": 3}, "buffer.max_age"),
        ({**EXPLORE, "explorer.partial": {"budget": 5}}, "explorer.partial"),
        ({**EXPLORE, "stages": [GRPO, {**GRPO, "name": "second"}]}, "stages"),
        ({**EXPLORE, "stages": [{**GRPO, "evaluate_every": 1}]}, "stages.grpo.evaluate_every"),
        ({"auxiliary.judge": {"model": "some/model", "engine": {"count": 0}}}, "auxiliary.judge.engine.count"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(overrides: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, check=about(field)):
        load_config({**base(), "stages": [GRPO]}, overrides)


def test_two_jobs_share_one_config_and_neither_places_the_buffer(tmp_path: Path) -> None:
    jobs = {"explore": {"master", "explorer", "engines", "engine_pool"}, "train": {"master", "trainer", "ranks"}}
    for mode, parts in jobs.items():
        config = load_config({**base(), "stages": [GRPO]}, {**EXPLORE, "mode": mode, "storage": str(tmp_path)})
        assert {part.name for part in plan_placement(config)} == parts
        assert config.buffer_folder == tmp_path / "buffer.lake", "a name that no run can have"


def test_every_explorer_has_its_reward_actors_if_they_are_asked_for() -> None:
    beside = {"explorer.count": 3, "reward.name": "math", "reward.workers": 2}
    for changes, actors in ((beside, None), ({**beside, "reward.placement": "pool", "reward.actors": 2}, 6)):
        parts = {part.name: part.count for part in plan_placement(load_config(base(), changes))}
        assert (parts["explorer"], parts.get("reward")) == (3, actors)


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


def test_pairs_are_ranked_during_a_stage_without_an_explorer() -> None:
    prefer = {**RM, "algorithm": {"name": "dpo"}, "evaluate_every": 1}
    given = {**base(), "mode": "train", "stages": [prefer], "demonstrations": {"pairs": {"path": "pairs.jsonl"}}}
    with pytest.raises(ConfigError, check=about("stages.rm.evaluate_every")):
        load_config(given)
    load_config(given, {"demonstrations.pairs.held_out": 0.25})


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
