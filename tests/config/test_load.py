"""Bad configurations: each error names the field, the value found and the remedy."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayrft.config import dump_config, load_config, load_run_config, parse_override, rules
from rayrft.config.trainer import ProbeBounds
from rayrft.errors import ConfigError
from tests.config.given import GRPO, SPELL, base, bench
from tests.errors import about


@pytest.mark.parametrize(
    "reward",
    [
        {},
        {"domains": {"own": {"name": "math", "parts": []}}},
        {"parts": [{"name": "exact"}, {"name": "math", "weight": 0.5}], "workers": 2},
        {"name": "math", "placement": "serve", "replicas": {"max": 2}},
    ],
)
def test_a_config_survives_being_written_and_read(reward: dict[str, Any]) -> None:
    config = load_config({**base(), "reward": reward})
    again = load_config(yaml.safe_load(dump_config(config)))
    assert again == config


def test_a_dictionary_is_the_same_run_as_the_file_it_would_be(tmp_path: Path) -> None:
    """The order of demonstrations decides which tasks each is given."""
    raw = base()
    raw["demonstrations"] = {"warmup": {"size": 5}, "expert": {"size": 10}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))
    given, read = load_config(raw, {"seed": 1}), load_config(tmp_path / "run.yaml", {"seed": 1})
    assert dump_config(given) == dump_config(read) and list(given.demonstrations) == ["warmup", "expert"]
    assert "seed" not in raw, "overrides leave the caller's dictionary alone"


def test_task_sources_are_overridden_by_number_and_those_with_a_name_by_name() -> None:
    raw = base()
    raw["tasks"]["sources"].append({"name": "gsm8k", "source": "file", "path": "a"})
    changes = {"tasks.sources.0.size": 20, "tasks.sources.1.weight": 3, "tasks.sources.gsm8k.path": "/b"}
    first, second = load_config(raw, changes).tasks.sources
    assert (first.size, second.weight, str(second.path)) == (20, 3.0, "/b")
    with pytest.raises(ConfigError, check=about("tasks.sources.2.size", "2")):
        load_config(raw, {"tasks.sources.2.size": 1})


def test_a_stage_may_name_the_edits_of_people_before_there_are_any() -> None:
    config = load_config(base(), {"stages.mix.demonstrations": "human"})
    assert config.grows(config.stages[-1]) and "human" not in config.demonstrations


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"name: caf\xe9", "is not text"),
        (b"stages: " + b"[" * 5000, "is not valid YAML"),
        (b"name: a\nmodel:\n  path: x\n  path: y\n", "'path' is given twice(?s:.*)line 4"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_file_that_is_no_mapping_or_has_a_key_twice_is_refused(
    content: bytes | None, problem: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        load_config(tmp_path / "run.yaml")


def test_a_mapping_may_override_what_it_takes_from_another(tmp_path: Path) -> None:
    text = yaml.safe_dump(base()) + "monitor: {<<: {stall_s: 50.0}, stall_s: 60.0}\n"
    (tmp_path / "run.yaml").write_text(f"\ufeff{text}")
    assert load_config(tmp_path / "run.yaml").monitor.stall_s == 60.0


@pytest.mark.parametrize(("text", "value"), [("1e-3", 1e-3), ("3E4", 3e4), ("-.5e+1", -5.0), ("1.e2", 100.0)])
def test_numbers_are_read_as_papers_write_them(text: str, value: float) -> None:
    assert parse_override(f"a={text}") == ("a", value)


def test_a_file_has_numbers_as_papers_write_them_and_text_that_looks_like_one_stays_text(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(base()).replace("mu: 0.1", "mu: 1e-1"))
    assert load_config(path).stages[0].algorithm.model_extra == {"mu": 0.1}
    config = load_config({**base(), "name": "1e5"})
    path.write_text(dump_config(config))
    assert load_config(path) == config and config.name == "1e5"


@pytest.mark.parametrize("text", ["trainer.ranks", "=3", ""])
def test_an_override_without_a_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, check=about("override", text)):
        parse_override(text)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"trainer.rank": 2}, r"^trainer\.rank: unknown key \(found 'rank'\)\. Did you mean 'ranks'\?$"),
        ({"stages.mix.steps": "many"}, r"^stages\.mix\.steps: Input should be a valid integer.*found 'many'"),
        ({"stages.mxi.steps": 3}, r"names an entry that does not exist \(found 'mxi'\)\. Did you mean 'mix'\?"),
        ({"stages.mix.group_size": 7}, r"^stages\.mix\.batch_size: .*32 usual rows.* group_size 7 .*40\)\. Give 43 "),
        ({"stages.mix.algorithm.name": "grop"}, r"^stages\.mix\.algorithm\.name: .*'grop'\)\. Did you mean 'grpo'\?$"),
    ],
)
def test_a_bad_value_is_named_with_its_remedy(override: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(base(), override)


SHARED = {"explorer.engine.gpus": 0.4, "trainer.gpus": 0.6}
KL = {"stages.mix.algorithm.kl": "k3", "stages.mix.algorithm.kl_coef": 0.1}
REFRESH = "stages.mix.update.reference_refresh"


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ({"explorer.engine.gpu": 1}, "explorer.engine.gpu", ()),
        ({"stages.mix.stepz": 3}, "stages.mix.stepz", ()),
        ({"model.tiny.heads": 8}, "model.tiny.hidden_size", ()),
        ({"model.path": "x"}, "model.path", ()),
        ({"tasks.sources.0.dataset": None}, "tasks.sources.0.dataset", ()),
        ({"tasks.sources.0.pathh": "x"}, "tasks.sources.0.pathh", ()),
        ({"tasks.sources.0.source": "file"}, "tasks.sources.0.path", ()),
        ({"tasks.sources.0.weight": 0}, "tasks.sources.0.weight", ()),
        ({"tasks.sources.0.weight": float("inf")}, "tasks.sources.0.weight", ()),
        ({"reward.fallback": float("nan")}, "reward.fallback", ()),
        ({"stages.mix.optimizer.lr": float("inf")}, "stages.mix.optimizer.lr", ()),
        ({"explorer.engine.gpus": float("inf")}, "explorer.engine.gpus", ()),
        ({"stages.mix.batch_size": 1 << 70}, "stages.mix.batch_size", ()),
        ({"model.template.file": "x" * 256}, "model.template.file", ()),
        ({"tasks.sources": []}, "tasks.sources", ()),
        ({"tasks.sources": [SPELL, SPELL]}, "tasks.sources", ()),
        ({"tasks.sampler": "easy_to_hard"}, "tasks.sources.0.difficulty", ()),
        ({"tasks.epochs": 0}, "tasks.epochs", ()),
        ({"tasks": {"sources_": []}}, "tasks.sources_", ()),
        ({"explorer.sampling.top_k": 5}, "explorer.sampling.top_k", ()),
        ({"max_staleness": -1}, "max_staleness", ()),
        ({"feedback.hold_steps": 1}, "feedback.hold_steps", (1,)),
        ({"feedback.hold_steps": 1, "max_staleness": 1, "buffer.sampler.name": "uniform"}, "feedback.hold_steps", ()),
        ({"name": "a b"}, "name", ()),
        ({"stages.mix.expert_share": 0.21}, "stages.mix.expert_share", (0.21,)),
        ({"stages.mix.expert_share": None}, "stages.mix.expert_share", (None,)),
        ({"stages.mix.expert_share": 0.0}, "stages.mix.expert_share", (0.0,)),
        ({"stages.mix.demonstrations": "expart"}, "stages.mix.demonstrations", ("expart",)),
        ({"stages.mix.algorithm.mu": 1.5}, "stages.mix.algorithm.mu", (1.5,)),
        ({"stages.mix.name": "final"}, "stages.final.name", ("final",)),
        ({"stages.mix.start_from": "warmup"}, "stages.mix.start_from", ("warmup",)),
        ({"trainer.ranks": 64}, "stages.mix.batch_size", (40,)),
        ({"buffer.sampler": {"name": "priority", "score": "td_error"}}, "buffer.sampler.score", ("td_error",)),
        ({"reward.truncated": "soft", "reward.overlong_buffer": 9}, "reward.overlong_buffer", (9,)),
        ({"model.max_length": 40}, "model.max_length", (40,)),
        ({"explorer.engine.gpus": 1}, "explorer.engine.gpus", (1,)),
        ({"explorer.engine.gpus": 1.5, "trainer.gpus": 1}, "explorer.engine.gpus", (1.5,)),
        ({"explorer.engine.sleep": True}, "explorer.engine.sleep", (None,)),
        ({"explorer.engine.tensor_parallel": 2}, "explorer.engine.tensor_parallel", (2,)),
        ({"stages": base()["stages"] * 2}, "stages", ("mix",)),
        ({"storage": "s3://bucket/runs"}, "storage", ("s3://bucket/runs",)),
        ({"buffer.storage": Path("s3://bucket/runs")}, "buffer.storage", ("s3:/bucket/runs",)),
        ({"plugins": ["gs://bucket/plugin.py"]}, "plugins", ("gs://bucket/plugin.py",)),
        ({"demonstrations.gold": {"path": "s3://a/b.jsonl"}}, "demonstrations.gold.path", ("s3://a/b.jsonl",)),
        ({"stages": []}, "stages", (None,)),
        ({"model.tiny": None}, "model.path", (None,)),
        ({"evaluation.max_tokens": 30}, "evaluation.max_tokens", (30,)),
        ({"evaluation.temperatures": [0.0, -1.0]}, "evaluation.temperatures.1", (-1.0,)),
        ({**SHARED, "evaluation.engines": 1}, "evaluation.engines", (1,)),
        ({**KL, "trainer.lora.rank": 4, REFRESH: 2}, REFRESH, ()),
    ],
)
def test_a_bad_value_is_named(override: dict[str, Any], field: str, value: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, check=about(field, *value)):
        load_config(base(), override)


SFT = {"name": "sft", "algorithm": {"name": "sft"}, "steps": 1, "batch_size": 8, "demonstrations": "expert"}
REWARDS = {"name": "r", "algorithm": {"name": "reward_model"}, "steps": 1, "batch_size": 8, "demonstrations": "expert"}


@pytest.mark.parametrize(
    ("stages", "override", "field", "value"),
    [
        ([REWARDS], {"trainer.router_loss": 0.1}, "trainer.router_loss", 0.1),
        ([GRPO, REWARDS], {"trainer.router_loss": 0.1}, "trainer.router_loss", 0.1),
        ([GRPO], {"trainer": {"router_loss": 0.1, "lora": {}}}, "trainer.router_loss", None),
        ([GRPO], {"trainer": {"expert_parallel": True, "ranks": 4, "replicas": 2}}, "trainer.expert_parallel", True),
        ([REWARDS], {"trainer.head_chunk": 64}, "trainer.head_chunk", 64),
        ([GRPO], {"trainer.rollbacks": 4}, "trainer.rollbacks", 4),
        ([GRPO], {"stages.grpo.demonstrations": "expert"}, "stages.grpo.demonstrations", "expert"),
        ([SFT], {"stages.sft.group_size": 4}, "stages.sft.group_size", 4),
        ([REWARDS], {"stages.r.update.reference_refresh": 1}, "stages.r.update.reference_refresh", None),
        ([GRPO, REWARDS], {"trainer.head_chunk": 64}, None, None),
        ([GRPO, SFT], {"trainer.router_loss": 0.1}, None, None),
        ([GRPO], {"trainer": {"not_finite": "rollback", "rollbacks": 4}}, None, None),
    ],
)
def test_an_option_that_a_stage_would_not_use_is_refused(
    stages: list[dict[str, Any]], override: dict[str, Any], field: str | None, value: Any
) -> None:
    given = base() | {"stages": stages, "demonstrations": {"expert": {"path": "pairs.jsonl"}}}
    if field is None:
        load_config(given, override)
        return
    with pytest.raises(ConfigError, check=about(field, value)):
        load_config(given, override)


@pytest.mark.parametrize(
    ("key", "optional"),
    [("stages.mix.evaluate_every", True), ("explorer.group_deadline_s", True), ("stages.mix.steps", False)],
)
def test_a_limit_that_may_be_left_out_says_how_where_it_is_too_small(key: str, optional: bool) -> None:
    with pytest.raises(ConfigError, check=about(key, 0)) as error:
        load_config(base(), {key: 0})
    assert ("null" in str(error.value)) is optional
    if optional:
        load_config(base(), {key: None})


GPUS = {"explorer.engine.gpus": 1, "trainer.gpus": 1}
HELPER: dict[str, Any] = {"model": "helper", "engine": {"count": 1}}
SCORED = {"name": "model", "options": {"model": "a-reward-model", "device": "cuda"}}
SERVED = {"placement": "serve", "replicas": {"gpus": 1}}
PLACED = {"name": "embedding_novelty", "device": "cuda:1"}
TWO = {"gpus": 2, "tensor_parallel": 2}
SERVED_BY = {"replicas": {"gpus": 1}}
ONE = "reward.domains.math.replicas.gpus"
TRAINS = {"mode": "train", "stages": [SFT]}
EXPLORES = {"mode": "explore", "buffer.name": "b", "stages": [GRPO], "demonstrations": {}}
TUNES = {"stages": [SFT], "evaluation.enabled": False}
EVEN = {"count": 2, "gpus": 0.5}
HALVES = {"explorer.engine": EVEN, "trainer": {"ranks": 2, "gpus": 0.5}, "evaluation.engines": 0}
IPC = {"weight_sync.backend": "ipc"}
LENT = {"count": 1, "gpus": 0.45, "tensor_parallel": 2}
HALF = {**EVEN, "gpu_memory_utilization": 0.8}


@pytest.mark.parametrize(
    ("override", "field", "found"),
    [
        (GPUS, None, {"explorer.engine.enforce_eager": False, "explorer.engine.most_running": 1024}),
        ({}, None, {"explorer.engine.enforce_eager": True, "explorer.engine.most_running": 256}),
        ({**GPUS, "explorer.engine.enforce_eager": True}, None, {"explorer.engine.enforce_eager": True}),
        ({**GPUS, "explorer.engine.max_running": 64}, None, {"explorer.engine.most_running": 64}),
        (GPUS, None, {"bucket_bytes": 512 << 20}),
        ({}, None, {"bucket_bytes": 32 << 20}),
        ({**GPUS, "weight_sync.bucket_mib": 0.5}, None, {"bucket_bytes": 512 << 10}),
        ({**GPUS, "explorer.sampling": {"max_prompt_tokens": 40}}, None, {"explorer.sampling.max_tokens": 24}),
        ({**GPUS, "explorer.sampling.max_tokens": 4}, None, {"explorer.sampling.max_tokens": 4}),
        ({"explorer.engine": TWO, "trainer.gpus": 1}, None, {"explorer.engine.tensor_parallel": 2}),
        ({"explorer.engine": TWO | {"gpus": 1}, "trainer.gpus": 1}, "explorer.engine.gpus", 1.0),
        ({"explorer.engine": TWO | {"gpus": 0}}, "explorer.engine.tensor_parallel", 2),
        ({"explorer.engine": {"gpus": 2}, "trainer.gpus": 1}, "explorer.engine.gpus", 2.0),
        ({"explorer.engine": TWO | {"gpus": 1.5}, "trainer.gpus": 1}, "explorer.engine.gpus", 1.5),
        ({**GPUS, "trainer.gpus": 2}, "trainer.gpus", 2.0),
        ({"auxiliary.user": {**HELPER, "engine": TWO}}, None, {"auxiliary.user.dtype": "bfloat16"}),
        ({"auxiliary.user": HELPER}, None, {"auxiliary.user.dtype": "float32"}),
        ({"auxiliary.user": {**HELPER, "engine": {"tensor_parallel": 2}}}, "auxiliary.user.engine.tensor_parallel", 2),
        ({"auxiliary.user": {**HELPER, "engine": {"gpus": 4}}}, "auxiliary.user.engine.gpus", 4.0),
        ({"auxiliary.user": {**HELPER, "engine": {"gpus": 1, "sleep": True}}}, "auxiliary.user.engine.sleep", None),
        ({"auxiliary.user": {**HELPER, "engine": HALF}}, "auxiliary.user.engine.gpu_memory_utilization", 0.8),
        (
            {"explorer.engine": HALF | {"count": 1}, "trainer.gpus": 0.5, "trainer.ranks": 1, "evaluation.engines": 0},
            None,
            {"explorer.engine.gpu_share": 0.8},
        ),
        ({"trainer.ranks": 32, "stages.mix.expert_share": 0.2}, None, {"trainer.ranks": 32}),
        ({"trainer.ranks": 6, "trainer.replicas": 4}, "trainer.replicas", 4),
        ({"trainer.ranks": 8, "trainer.replicas": 4}, None, {"trainer.shards": 2}),
        ({"reward": SCORED}, "reward.options.device", "cuda"),
        ({"reward": {"parts": [{"name": "exact"}, {**SCORED, "label": "b"}]}}, "reward.parts.1.options.device", "cuda"),
        ({"reward": {"domains": {"math": SCORED}}}, "reward.domains.math.options.device", "cuda"),
        ({"reward": {**SCORED, "placement": "serve"}}, "reward.options.device", "cuda"),
        ({"reward": {**SCORED, **SERVED}}, None, {"reward.replicas.gpus": 1.0}),
        ({"pipelines.experiences": [PLACED]}, "pipelines.experiences.0.device", "cuda:1"),
        ({"pipelines.batch": [PLACED]}, "pipelines.batch.0.device", "cuda:1"),
        ({"pipelines.tasks": [PLACED], "pipelines.task_workers": 2}, "pipelines.tasks.0.device", "cuda:1"),
        ({"pipelines.tasks": [PLACED]}, None, {"pipelines.task_workers": 1}),
        ({"pipelines": {"experiences": [PLACED], "actors": {"gpus": 1}}}, None, {"pipelines.actors.gpus": 1.0}),
        ({"reward": SERVED}, "reward.replicas.gpus", 1.0),
        ({"reward": {"placement": "serve", "domains": {"math": SCORED | SERVED_BY | {"options": {}}}}}, ONE, 1.0),
        ({**TRAINS, "explorer.engine.gpus": 1}, "explorer.engine.gpus", 1.0),
        ({**TRAINS, "trainer.gpus": 1}, None, {"trainer.gpus": 1.0}),
        ({**TRAINS, "auxiliary.user": {**HELPER, "engine": TWO}}, "auxiliary.user.engine.gpus", 2.0),
        ({**TRAINS, "auxiliary.user": HELPER}, None, {"auxiliary.user.engine.gpus": 0.0}),
        (
            {**TRAINS, "auxiliary.user": {**HELPER, "engine": TWO}, "pipelines.tasks": [{"name": "exact_duplicates"}]},
            None,
            {"auxiliary.user.engine.gpus": 2.0},
        ),
        ({**TUNES, "trainer.gpus": 1}, None, {"rolls_out": False}),
        ({**TUNES, **GPUS}, "explorer.engine.gpus", 1.0),
        ({**EXPLORES, "trainer.gpus": 1}, "trainer.gpus", 1.0),
        ({**EXPLORES, "explorer.engine.gpus": 1}, None, {"explorer.engine.gpus": 1.0}),
        ({**GPUS, "explorer.engine.kv_cache_mib": 128}, "explorer.engine.kv_cache_mib", 128),
        ({**TRAINS, "trainer.gpus": 0.5, "trainer.ranks": 2}, "trainer.gpus", 0.5),
        ({**TRAINS, "trainer.gpus": 0.5, "trainer.ranks": 1}, None, {"trainer.gpus": 0.5}),
        ({**HALVES, "explorer.engine": LENT}, None, {"colocated": True, "lends_gpus": True}),
        (
            {**HALVES, "explorer.engine": LENT | {"count": 2}, "weight_sync.backend": "ipc"},
            "weight_sync.backend",
            "ipc",
        ),
        ({**EXPLORES, "explorer.engine": LENT}, "explorer.engine.tensor_parallel", 2),
        ({"auxiliary.user": {**HELPER, "engine": LENT}}, "auxiliary.user.engine.tensor_parallel", 2),
        (
            {**HALVES, "explorer.engine": {**TWO, "count": 1}, "weight_sync.backend": "ipc"},
            "weight_sync.backend",
            "ipc",
        ),
        ({**HALVES, "weight_sync.backend": "files"}, "trainer.gpus", 0.5),
        ({**HALVES, "trainer": {"ranks": 1, "gpus": 0.5}, "weight_sync.backend": "files"}, None, {"colocated": False}),
        (HALVES, None, {"colocated": True, "lends_gpus": False}),
    ],
)
def test_gpus_are_used_whole_and_with_defaults_of_their_own(override: Any, field: str | None, found: Any) -> None:
    if field is not None:
        with pytest.raises(ConfigError, check=about(field, *([] if found is None else [found]))):
            load_config(base(), override)
        return
    config = load_config(base(), override)
    assert load_config(yaml.safe_load(dump_config(config))) == config
    for path, expected in found.items():
        assert functools.reduce(_part, path.split("."), config) == expected


def _part(section: Any, key: str) -> Any:
    return section[key] if isinstance(section, dict) else getattr(section, key)


def test_engines_that_share_a_gpu_take_their_part_of_it() -> None:
    with pytest.raises(ConfigError, check=about("explorer.engine.gpu_memory_utilization", 0.8)):
        load_config(bench(), {"explorer.engine": HALF})
    config = load_config(bench(), {"explorer.engine": {**EVEN, "gpu_memory_utilization": 0.4}})
    assert config.explorer.engine.gpu_share == 0.4
    assert load_config(bench(), {"explorer.engine": EVEN}).explorer.engine.gpu_share == 0.425


def test_no_rule_is_forgotten() -> None:
    assert {rule.__name__ for rule in rules.RULES} == {name for name in vars(rules) if name.startswith("check_")}


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, check=about("config", "/nowhere.yaml")):
        load_config("/nowhere.yaml")


@pytest.mark.parametrize(
    ("gpus", "backend"), [((0, 0), "gloo"), ((1, 1), "nccl"), ((0.4, 0.5), "ipc")], ids=["cpu", "apart", "shared"]
)
def test_the_transfer_backend_follows_from_the_devices(gpus: tuple[float, float], backend: str) -> None:
    config = load_config(base(), {"explorer.engine.gpus": gpus[0], "trainer.gpus": gpus[1]})
    assert config.sync_backend == backend


@pytest.mark.parametrize(
    ("dtype", "given", "bounds"),
    [
        ("float32", None, ProbeBounds(1e-4, 1e-4, 1.0)),
        ("bfloat16", None, ProbeBounds(0.03, 0.2, 0.99)),
        ("float32", 1e-3, ProbeBounds(1e-3, 1e-3, 1.0)),
        ("bfloat16", 0.4, ProbeBounds(0.06, 0.4, 0.99)),
    ],
)
def test_the_probes_bounds_follow_from_the_precision(dtype: str, given: float | None, bounds: ProbeBounds) -> None:
    config = load_config(base(), {"model.dtype": dtype, "weight_sync.tolerance": given})
    found = config.probe_bounds
    assert (found.mean, found.most, found.share) == pytest.approx((bounds.mean, bounds.most, bounds.share))


def test_a_folder_that_is_not_absolute_is_the_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(base(), {"storage": "runs"})
    assert (config.folder, config.buffer_folder) == (tmp_path / "runs/a", tmp_path / "runs/a/buffer")
    assert load_config(base(), {"buffer.storage": "logs"}).buffer_folder == tmp_path / "logs/a"


def test_an_unknown_key_of_a_run_folder_is_another_versions_and_one_of_an_override_is_not(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(load_config(base())))
    with pytest.raises(ConfigError, match=r"Did you mean 'steps'", check=about("stages.mix.stepz")):
        load_run_config(tmp_path, {"stages.mix.stepz": 1})
    raw = yaml.safe_load((tmp_path / "config.yaml").read_text())
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**raw, "of_old": 1}))
    for overrides in ({}, {"stages.mix.steps": 1}, {"stages.mix.stepz": 1}):
        with pytest.raises(ConfigError, match="Use the version that wrote it", check=about("of_old")):
            load_run_config(tmp_path, overrides)
