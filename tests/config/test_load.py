"""Bad configurations: each error names the field, the value found and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rayrft.config import RunConfig, dump_config, load_config, parse_override
from rayrft.config.trainer import ProbeBounds
from rayrft.errors import ConfigError

SPELL = {"name": "spell", "source": "reasoning_gym", "dataset": "spell_backward", "size": 10}
JOBS = Path(__file__).resolve().parents[2] / "jobs"


def base() -> dict[str, Any]:
    return {
        "name": "a",
        "model": {"tiny": {}, "max_length": 64},
        "tasks": {"sources": [{"source": "reasoning_gym", "dataset": "spell_backward", "size": 10}]},
        "explorer": {"sampling": {"max_tokens": 8, "max_prompt_tokens": 40}},
        "demonstrations": {"expert": {"size": 10}},
        "stages": [
            {
                "name": "mix",
                "algorithm": {"name": "mix", "mu": 0.1},
                "steps": 3,
                "batch_size": 40,
                "group_size": 8,
                "expert_share": 0.2,
                "demonstrations": "expert",
            }
        ],
    }


def test_batch_arithmetic_is_derived() -> None:
    [stage] = load_config(base()).stages
    assert (stage.expert_rows, stage.usual_rows, stage.groups) == (8, 32, 4)


def test_a_config_survives_being_written_and_read() -> None:
    config = load_config(base())
    again = load_config(yaml.safe_load(dump_config(config)))
    assert again == config


def test_overrides_reach_list_entries_by_name_and_by_number() -> None:
    config = load_config(base(), {"stages.mix.steps": 7, "stages.0.optimizer.lr": 0.5, "trainer.ranks": 1})
    assert (config.stages[0].steps, config.stages[0].optimizer.lr, config.trainer.ranks) == (7, 0.5, 1)


def test_task_sources_are_overridden_by_number_and_those_with_a_name_by_name() -> None:
    raw = base()
    raw["tasks"]["sources"].append({"name": "gsm8k", "source": "file", "path": "a"})
    changes = {"tasks.sources.0.size": 20, "tasks.sources.1.weight": 3, "tasks.sources.gsm8k.path": "/b"}
    first, second = load_config(raw, changes).tasks.sources
    assert (first.size, second.weight, str(second.path)) == (20, 3.0, "/b")
    with pytest.raises(ConfigError, match=r"tasks\.sources\.2\.size: no such entry \(found '2'\)\. Known: 0, gsm8k"):
        load_config(raw, {"tasks.sources.2.size": 1})


@pytest.mark.parametrize(("text", "value"), [("1e-3", 1e-3), ("3E4", 3e4), ("-.5e+1", -5.0), ("1.e2", 100.0)])
def test_numbers_are_read_as_papers_write_them(text: str, value: float) -> None:
    assert parse_override(f"a={text}") == ("a", value)


def test_a_file_has_numbers_as_papers_write_them(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(base()).replace("mu: 0.1", "mu: 1e-1"))
    assert load_config(path).stages[0].algorithm.model_extra == {"mu": 0.1}


def test_text_that_looks_like_a_number_stays_text(tmp_path: Path) -> None:
    config = load_config({**base(), "name": "1e5"})
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config and config.name == "1e5"


@pytest.mark.parametrize("text", ["trainer.ranks", "=3", ""])
def test_an_override_without_a_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"written key\.sub=value"):
        parse_override(text)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"trainer.rank": 2}, r"trainer\.rank: unknown key \(found 'rank'\)\. Did you mean 'ranks'\?"),
        ({"explorer.engine.gpu": 1}, r"explorer\.engine\.gpu: unknown key.*Did you mean 'gpus'\?"),
        ({"stages.mix.stepz": 3}, r"stages\.0\.stepz: unknown key.*Did you mean 'steps'\?"),
        ({"stages.mxi.steps": 3}, r"no such entry \(found 'mxi'\)\. Did you mean 'mix'\?"),
        ({"stages.mix.steps": "many"}, r"stages\.0\.steps: Input should be a valid integer.*found 'many'"),
        ({"stages.mix.group_size": 7}, r"32 own rows .* are not whole groups of group_size 7; batch_size 43 "),
        ({"stages.mix.expert_share": 0.21}, r"expert_share 0\.21 of batch_size 40 is 8\.4 rows"),
        ({"stages.mix.expert_share": None}, r"mix needs expert_share"),
        ({"stages.mix.expert_share": 0.0}, r"mu is 0\.1 but the batch holds no expert rows"),
        ({"stages.mix.demonstrations": "expart"}, r"no entry 'expart' in 'demonstrations'"),
        (
            {"stages.mix.algorithm.name": "grop"},
            r"stage 'mix': algorithm\.name: unknown algorithm \(found 'grop'\)\. Did you mean 'grpo'\?",
        ),
        ({"stages.mix.algorithm.mu": 1.5}, r"stage 'mix': algorithm\.mu: must lie in \[0, 1\] \(found 1\.5\)"),
        ({"stages.mix.name": "final"}, r"a stage cannot be named 'final'"),
        ({"stages.mix.start_from": "warmup"}, r"start_from 'warmup' is not an earlier stage"),
        ({"trainer.ranks": 16}, r"cannot be dealt to 16 ranks"),
        ({"model.tiny.heads": 8}, r"hidden_size 128 over heads 8 must be a multiple of 32.*hidden_size 256 would be"),
        ({"model.path": "x"}, r"exactly one of 'path'"),
        (
            {"buffer.sampler.name": "priority", "buffer.sampler.score": "td_error"},
            r"buffer\.sampler\.score 'td_error' needs a critic, and no stage has one: use algorithm ppo, or a score",
        ),
        (
            {"reward.truncated": "soft", "reward.overlong_buffer": 9},
            r"reward\.overlong_buffer 9 exceeds explorer\.sampling\.max_tokens 8",
        ),
        ({"model.max_length": 40}, r"max_prompt_tokens 40 \+ max_tokens 8 exceed model\.max_length 40"),
        ({"tasks.sources.0.dataset": None}, r"tasks\.sources\.0: source 'reasoning_gym' needs 'dataset'"),
        ({"tasks.sources.0.pathh": "x"}, r"tasks\.sources\.0\.pathh: unknown key.*Did you mean 'path'\?"),
        ({"tasks.sources.0.source": "file"}, r"tasks\.sources\.0: source 'file' needs 'path'"),
        ({"tasks.sources.0.weight": 0}, r"tasks\.sources\.0\.weight: .*greater than 0"),
        ({"tasks.sources.0.weight": float("inf")}, r"tasks\.sources\.0\.weight: .*finite"),
        ({"tasks.sources": []}, r"tasks\.sources: .*at least 1 item"),
        ({"tasks.sources": [SPELL, SPELL]}, r"two task sources are named 'spell'"),
        ({"tasks.sampler": "easy_to_hard"}, r"'easy_to_hard' needs 'difficulty' in every source; source 0 has none"),
        ({"tasks.epochs": 0}, r"tasks\.epochs: .*greater than or equal to 1"),
        ({"tasks": {"source": "file", "path": "x"}}, r"tasks\.sources: a required key is missing"),
        ({"weight_sync.backend": "nccl"}, r"'nccl' needs explorer\.engine\.gpus"),
        ({"explorer.engine.gpus": 1}, r"give GPUs to both or to neither"),
        ({"explorer.engine.gpus": 0.5, "trainer.gpus": 0.6}, r"ipc pairs one engine with one trainer rank"),
        ({"explorer.engine.gpus": 1.5, "trainer.gpus": 1}, r"explorer\.engine\.gpus 1\.5: .* a whole number"),
        ({"explorer.engine.gpus": 0.2, "trainer.gpus": 0.3}, r"pairs of engine and rank would lie on one"),
        ({"explorer.engine.sleep": True}, r"explorer\.engine\.sleep is for engine and trainer taking turns on one GPU"),
        ({"explorer.engine.tensor_parallel": 2}, r"above 1 needs GPUs"),
        ({"explorer.sampling.top_k": 5}, r"unknown key"),
        ({"max_staleness": -1}, r"max_staleness: .*greater than or equal to 0"),
        ({"name": "a b"}, r"name: String should match pattern"),
    ],
)
def test_a_bad_value_is_named_with_its_remedy(override: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(base(), override)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no such config file \(found '/nowhere\.yaml'\)"):
        load_config("/nowhere.yaml")


def test_two_stages_of_one_name_are_refused() -> None:
    config = base()
    config["stages"] *= 2
    with pytest.raises(ConfigError, match="two stages are named 'mix'"):
        load_config(config)


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
def test_how_closely_engine_and_trainer_must_agree_follows_from_the_precision(
    dtype: str, given: float | None, bounds: ProbeBounds
) -> None:
    config = load_config(base(), {"model.dtype": dtype, "weight_sync.tolerance": given})
    found = config.probe_bounds
    assert (found.mean, found.most, found.share) == pytest.approx((bounds.mean, bounds.most, bounds.share))


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(JOBS.glob("*.yaml")) if path.stem != "quickstart_controls"],
    ids=lambda path: path.name,
)
def test_every_config_that_is_shipped_is_valid(path: Path) -> None:
    config: RunConfig = load_config(path)
    assert config.storage.is_absolute()
