"""Memory on GPUs is known before a run: what each part takes, what does not fit, and which setting makes it fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from torch.distributed.tensor import DTensor
from transformers import Qwen2VLConfig
from typer.testing import CliRunner

from rayrft.cli.main import app
from rayrft.config import load_config
from rayrft.config.trainer import LoraConfig, OptimizerConfig, TrainerConfig
from rayrft.core.plan import StepVolume, check_memory, engine_share, plan, plan_memory, plan_steps
from rayrft.errors import ConfigError, PlacementError
from rayrft.trainer.blame import device_failed
from rayrft.trainer.dcp import Checkpointer
from rayrft.trainer.loading import load_policy
from rayrft.trainer.memory import activation_bytes, memory_savings, rank_memory, shape_of, tower_bytes
from rayrft.trainer.model import gather, save_hf
from rayrft.trainer.optimizer import Optimizer
from tests.config.given import GRPO, base
from tests.core.given import config_of
from tests.errors import about
from tests.trainer.families import FAMILIES, SHAPES


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders with the configs of large models, and no weights."""
    found = {}
    for name, config in {**SHAPES, "experts": FAMILIES["qwen3 moe"]}.items():
        folder = tmp_path_factory.mktemp("model")
        config.save_pretrained(folder)
        found[name] = str(folder)
    return found


# A second reading, by hand and by a run under fake tensors: per GPU, in GB, without and with checkpointing.
TABLE = [
    ("qwen3 0.6B", 2, 41, 10),
    ("qwen3 0.6B", 4, 39, 8),
    ("qwen3 0.6B", 6, 38, 7),
    ("qwen3 8B", 4, 170, 51),
    ("qwen3 8B", 6, 159, 40),
    ("qwen3 8B", 8, 153, 35),
    ("qwen3 32B", 8, None, 96),
    ("qwen3 32B", 12, None, 74),
    ("qwen3 32B", 14, None, 68),
    ("qwen3 32B", 16, None, 63),
]


@pytest.mark.parametrize(("name", "ranks", "plain", "checkpointed"), TABLE)
def test_a_rank_takes_what_was_reckoned_by_hand(
    models: dict[str, str], name: str, ranks: int, plain: int | None, checkpointed: int
) -> None:
    for checkpointing, expected in ((False, plain), (True, checkpointed)):
        [*_, rank] = plan_memory(config_of(models[name], ranks, gradient_checkpointing=checkpointing), 80.0)
        assert expected is None or rank.total == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("name", "kilobytes"), [("qwen3 0.6B", 71.8), ("qwen3 8B", 215.3), ("qwen3 32B", 379.4)])
def test_activations_of_a_layer_are_counted_by_a_run_without_memory(
    models: dict[str, str], name: str, kilobytes: float
) -> None:
    assert activation_bytes(models[name]) / 1000 == pytest.approx(kilobytes, rel=0.01)


def test_a_vision_tower_takes_what_was_counted(tiny_vision_model: Path) -> None:
    tower, side, kept = load_policy(str(tiny_vision_model)).bfloat16().model.base_model.visual, 24, dict[int, int]()
    weights = {each.data_ptr() for each in tower.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes() * (storage.data_ptr() not in weights)
        held.append(tensor)  # else its place is used again
        return tensor

    held = list[torch.Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        patches = torch.zeros(3 * side**2, tower.patch_embed.proj.weight[0].numel(), dtype=torch.bfloat16)
        tower(patches, grid_thw=torch.tensor([[1, side, side]] * 3))
    plain, checkpointed = tower_bytes(str(tiny_vision_model))
    tokens = 3 * side**2 / tower.spatial_merge_size**2
    assert plain == pytest.approx(sum(kept.values()) / tokens, rel=0.02) and checkpointed < plain


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_of_prompts_that_are_images_are_in_the_plan(checkpointing: bool, tmp_path: Path) -> None:
    Qwen2VLConfig().save_pretrained(tmp_path)
    config = config_of(str(tmp_path), 8, gradient_checkpointing=checkpointing)
    with mock.patch("rayrft.trainer.memory.tower_bytes", lambda path: (0.0, 0.0)):
        [*_, texts] = plan_memory(config, 80.0)
    [*_, rank] = plan_memory(config, 80.0)
    # 32 blocks of 1280, of four patches a token; a third of the tokens may be of images.
    each = 4 * ((2 * 1280 * 32 + 72e3) if checkpointing else 59e3 * 32)
    assert rank.parts["activations"] - texts.parts["activations"] == pytest.approx(16384 / 3 * each / 1e9, rel=0.02)


QUANTISED = "moments: 8bit (package torchao)"


def test_an_error_for_want_of_memory_says_which_setting_saves_how_much(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = config_of(models["qwen3 0.6B"], 2).trainer
    savings = partial(memory_savings, models["qwen3 0.6B"], trainer, half=True)

    def said(raises: Callable[[], Any], **beside: Any) -> dict[str, float]:
        with pytest.raises(torch.OutOfMemoryError) as raised:
            raises()
        failed = device_failed(raised.value, 0, "node", trainer, partial(savings, **beside))
        assert failed is not None
        found = re.findall(r"([^;]+) \(([\d.]+) gib less\)", failed.remedy.lower())
        return {text.rpartition("trainer.")[2]: float(gib) * 2**30 for text, gib in found}

    full = mock.Mock(side_effect=torch.OutOfMemoryError)

    # Of 33 GB of activations 2.1 are left, or half; 16 bytes of each of 0.6e9 parameters are shared by two, or by four,
    # of which 8 are moments.
    def shared(bytes_each: float, models: int = 1) -> dict[str, float]:
        saved = {"cpu_offload: true": bytes_each / 2, "ranks to 4": bytes_each / 4, QUANTISED: (8 - 2) * models / 2}
        return {text: each * 0.6e9 for text, each in saved.items()}

    large = {"gradient_checkpointing: true": (33.0 - 2.1) * 1e9, "micro_batch_tokens to 8192": 16.5e9}
    found = said(full)
    assert found == pytest.approx({**large, **shared(16), "head_chunk to 512": 0.93e9}, rel=0.1)
    assert [*found.values()] == sorted(found.values(), reverse=True)

    # Neither is of use where no activations are held: the models beside the policy are shared, too.
    monkeypatch.setattr(torch.nn.utils, "get_total_norm", full)
    clip = Optimizer([torch.nn.Parameter(torch.zeros(1))], OptimizerConfig(), steps=1).clip
    assert said(clip) == pytest.approx(shared(16), rel=0.1)
    assert said(clip, critic=True, reference=True) == pytest.approx(shared(16 + 16 + 4, models=2), rel=0.1)
    trainer = trainer.model_copy(update={"accumulate": "unsharded"})
    savings = partial(memory_savings, models["qwen3 0.6B"], trainer, half=True)
    assert said(clip)["accumulate: sharded"] == pytest.approx(4 / 2 * 0.6e9, rel=0.1)
    monkeypatch.setattr("rayrft.trainer.dcp.checkpoint_state", full)
    for outside in (
        lambda: gather(mock.Mock(spec=DTensor, to_local=full), torch.bfloat16),
        lambda: save_hf(mock.Mock(state_dict=full), mock.Mock(), tmp_path, dtype=torch.bfloat16),
        lambda: Checkpointer.save(mock.Mock(), mock.Mock(), tmp_path, print),
    ):
        assert said(outside, teacher=models["qwen3 0.6B"]) == pytest.approx(shared(12 + 2), rel=0.1)
    nothing = memory_savings(str(tmp_path), trainer, ["states"], half=True)
    assert nothing == [], "a model that cannot be counted"


def test_the_head_takes_its_share_of_a_gpu_or_what_the_config_says(models: dict[str, str]) -> None:
    def head(gpu_gb: float, **trainer: Any) -> float:
        [*_, rank] = plan_memory(config_of(models["qwen3 0.6B"], 2, **trainer), gpu_gb)
        return rank.parts["head"]

    weight, logits = 4 * 151_936 * 1024 / 1e9, 3 * 4 * 151_936 / 1e9
    assert head(80.0) == pytest.approx(weight + 1024 * logits) and head(141.0) > head(80.0) > head(24.0)
    assert head(80.0, head_chunk=64) == pytest.approx(weight + 64 * logits)


def test_what_does_not_fit_is_said_with_the_setting_that_does(models: dict[str, str]) -> None:
    engine, rank = plan_memory(config_of(models["qwen3 0.6B"], 2), 80.0)
    assert engine.fits and rank.fits and str(rank).endswith("fits") and "activations 33" in str(rank)
    [_, rank] = plan_memory(config_of(models["qwen3 0.6B"], 2), 40.0)
    assert not rank.fits and rank.remedy.startswith("trainer.gradient_checkpointing: true takes 8.")
    engine, rank = plan_memory(config_of(models["qwen3 32B"], 8, gradient_checkpointing=True), 80.0)
    assert rank.remedy.startswith("trainer.ranks: 12 takes 7") and "tensor_parallel and gpus 2 fit" in str(engine)
    [_, rank] = plan_memory(config_of(models["qwen3 32B"], 12, gradient_checkpointing=True), 80.0)
    assert rank.fits


def test_placement_refuses_what_no_micro_batch_makes_fit(models: dict[str, str]) -> None:
    check_memory(config_of(models["qwen3 8B"], 8), 80.0)  # too large micro-batches may yet be halved
    with pytest.raises(PlacementError, check=about("engines")):
        check_memory(config_of(models["qwen3 32B"], 16, gradient_checkpointing=True), 40.0)
    config = config_of(models["llama 70B"], 8)
    tensors = config.model_copy(update={"mode": "train"})
    with pytest.raises(PlacementError, check=about("ranks")) as error:
        check_memory(tensors, 80.0)
    assert error.value.remedy.startswith("trainer.ranks: ")


def test_models_beside_the_policy_and_adapters_count(models: dict[str, str]) -> None:
    shape = shape_of(models["qwen3 8B"])
    plain = rank_memory(shape, TrainerConfig(ranks=8), half=True)
    assert rank_memory(shape, TrainerConfig(ranks=8), half=True, reference=True).models == pytest.approx(
        4 * shape.parameters / 8
    )
    assert rank_memory(shape, TrainerConfig(ranks=8), half=True, critic=True).models == pytest.approx(
        plain.states + plain.gradients
    )
    assert rank_memory(shape, TrainerConfig(ranks=8), half=True, teacher=shape).models == 2 * shape.parameters / 8
    assert rank_memory(shape, TrainerConfig(ranks=32, replicas=4), half=True) == plain
    adapted = rank_memory(shape, TrainerConfig(ranks=8, lora=LoraConfig(rank=16)), half=True, reference=True)
    assert adapted.models == 0 and 2 * shape.parameters < 8 * adapted.states < 2.2 * shape.parameters
    packed = rank_memory(shape, TrainerConfig(ranks=8, lora=LoraConfig(rank=16, frozen="nf4")), half=True)
    saved = 8 * (adapted.states - packed.states) / shape.adapted
    assert saved == pytest.approx(2 - 4.25 / 8) and shape.parameters - 2 * 151936 * shape.hidden < 1.001 * shape.adapted
    assert packed.gathered < adapted.gathered
    assert rank_memory(shape, TrainerConfig(ranks=8, cpu_offload=True), half=True).states == 0
    whole = rank_memory(shape, TrainerConfig(ranks=8, accumulate="unsharded"), half=True)
    assert whole.gradients == 4 * shape.parameters


def test_experts_that_ranks_share_are_gathered_by_none(models: dict[str, str]) -> None:
    shape, dense = shape_of(models["experts"]), shape_of(models["qwen3 0.6B"])
    kept, shared = (TrainerConfig(ranks=4, expert_parallel=spreads) for spreads in (False, True))
    assert shape.experts == 4 * 3 * 32 * 16 and dense.experts == 0
    saved = rank_memory(shape, kept, half=True).gathered - rank_memory(shape, shared, half=True).gathered
    assert saved == 2 * 2 * shape.experts * 3 // 4
    assert rank_memory(dense, kept, half=True) == rank_memory(dense, shared, half=True)
    changes = dict(memory_savings(models["experts"], kept, ["gathered"], half=True))
    assert changes["set trainer.expert_parallel: true"] == saved


def test_what_stays_in_the_hosts_memory_counts_and_is_compared_with_what_is_reserved(models: dict[str, str]) -> None:
    def host(**changes: Any) -> list[float]:
        config = load_config(config_of(models["qwen3 0.6B"], 2), changes)
        return [part.host * 1e9 / shape.parameters for part in plan_memory(config, 80.0)]

    shape = shape_of(models["qwen3 0.6B"])
    assert host() == [0.0, 12 / 2], "the copy that a checkpoint is written from"
    assert host(**{"trainer.cpu_offload": True}) == pytest.approx([0.0, (12 + 12 + 4) / 2])
    assert host(**{"weight_sync.backend": "files"}) == [2.0, 12 / 2 + 2]
    shared = {"explorer.engine.gpus": 0.45, "trainer.gpus": 0.5, "weight_sync.backend": "ipc"}
    assert host(**shared, **{"explorer.engine.sleep": True}) == [2.0, 12 / 2]

    [_, rank] = plan_memory(config_of(models["qwen3 0.6B"], 2), 80.0)
    assert "of the host, of which memory_gib reserves 1.3" in str(rank)
    [_, rank] = plan_memory(config_of(models["qwen3 0.6B"], 2, memory_gib=16), 80.0)
    assert "GB of the host. fits" in str(rank)


def test_an_engine_has_its_buckets_and_room_for_so_many_tokens(models: dict[str, str]) -> None:
    config = config_of(models["qwen3 0.6B"], 2)
    engine, _ = plan_memory(config, 80.0)
    assert engine.parts["buckets"] == pytest.approx(2 * (512 << 20) / 1e9)
    token = 2 * shape_of(models["qwen3 0.6B"]).kv_numbers
    others = sum(size for name, size in engine.parts.items() if "KV" not in name)
    assert engine.cached_tokens == pytest.approx((0.85 * 80 - others) * 1e9 / token, rel=1e-6)
    rows = engine.cached_tokens // 2048
    assert rows > 200 and f"KV cache of {engine.cached_tokens:,} tokens, {rows:,} of the longest rows" in str(engine)
    explores = config.model_copy(update={"mode": "explore"})
    assert "buckets" not in plan_memory(explores, 80.0)[0].parts, "its weights do not change"


def test_a_model_that_is_made_at_the_start_has_a_plan_on_cpus_alone() -> None:
    [volume] = plan({**base(), "demonstrations": {}, "stages": [GRPO]}, step_s=86.4)
    assert isinstance(volume, StepVolume) and volume.tokens > 0
    assert volume.log_gb == pytest.approx(volume.log_mb) and f"{volume.rows} rows" in str(volume)
    assert volume.disk_gb == volume.log_gb and not volume.checkpoint_gb, "the size of its model is not known"
    with pytest.raises(ConfigError, check=about("model.path")):
        plan(base(), **{"trainer.gpus": 1, "explorer.engine.gpus": 1})


@pytest.mark.parametrize(("key", "workflow"), [("explorer", "episode"), ("tasks.sources.0", "multi_turn")])
def test_rows_of_several_turns_are_planned_as_long_as_the_model_allows(key: str, workflow: str) -> None:
    [answers] = plan_steps(load_config(base()), 1.0)
    [turns] = plan_steps(load_config(base(), {f"{key}.workflow": workflow}), 1.0)
    assert answers.tokens < turns.tokens == turns.rows * 64


def test_a_day_of_checkpoints_is_planned_with_what_retention_leaves(models: dict[str, str]) -> None:
    def volume(step_s: float = 86.4, **changes: Any) -> StepVolume:
        config = load_config(config_of(models["qwen3 0.6B"], 2), {"stages.grpo.steps": 400, **changes})
        [found] = plan_steps(config, step_s)
        return found

    parameters, at_most = shape_of(models["qwen3 0.6B"]).parameters, {"buffer.log_bytes": 1 << 30}
    plain = volume()
    assert plain.checkpoint_gb == pytest.approx(12 * parameters / 1e9)
    assert plain.checkpoints_gb == pytest.approx(20 * plain.checkpoint_gb), "1,000 steps, every 50"
    assert plain.disk_gb == pytest.approx(plain.log_gb + 2 * plain.checkpoint_gb)
    assert volume(**{"checkpoint.keep_best": 3}).disk_gb == pytest.approx(plain.log_gb + 5 * plain.checkpoint_gb)
    assert volume(**at_most).disk_gb == pytest.approx(1.073741824 + 2 * plain.checkpoint_gb)
    assert volume(86400.0).disk_gb == pytest.approx(plain.log_gb / 1000 + plain.checkpoint_gb / 50), "less than one"
    at_end = volume(**{"checkpoint.every": None, "stages.grpo.steps": 500})
    assert at_end.checkpoints_gb == pytest.approx(2 * plain.checkpoint_gb)
    assert volume(**{"stages.grpo.algorithm.kl": "k3"}).checkpoint_gb == pytest.approx(16 * parameters / 1e9)
    adapter = volume(**{"trainer.lora": {"rank": 8}, "stages.grpo.algorithm.kl": "k3"})
    assert adapter.checkpoint_gb == pytest.approx(12 * 8 * shape_of(models["qwen3 0.6B"]).linear / 1e9)


def test_the_command_says_what_fits(models: dict[str, str], tmp_path: Path) -> None:
    raw = config_of(models["qwen3 0.6B"], 2).model_dump(mode="json", exclude_unset=True)
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(raw))
    for gpu, code, total, said in ((80, 0, "40", "fits"), (40, 1, "39", "does not fit")):
        result = CliRunner().invoke(app, ["plan", str(tmp_path / "my.yaml"), "--gpu-gb", str(gpu)])
        assert result.exit_code == code and re.search(rf"rank \(2\): {total}\.\d of", result.output)
        *_, rank, step = result.output.splitlines()
        assert said in rank and step.startswith("stage ") and "1,024 rows and 1,572,864 tokens a step" in step


def test_an_engine_beside_a_rank_takes_what_the_rank_leaves(models: dict[str, str]) -> None:
    def shared(sleep: bool, **changes: Any) -> Any:
        gpus = {"explorer.engine.gpus": 0.45, "trainer.gpus": 0.5, "explorer.engine.sleep": sleep}
        return load_config(config_of(models["qwen3 0.6B"], 2), {**gpus, "weight_sync.backend": "ipc", **changes})

    for sleep, held in ((True, ("states", "models", "gathered", "head")), (False, None)):
        engine, rank = plan_memory(shared(sleep), 80.0)
        beside = sum(size for name, size in rank.parts.items() if held is None or name in held)
        assert engine.room == pytest.approx(76 - beside - 2 * 0.537, abs=0.1)
        assert engine_share(shared(sleep), 80.0) == engine.room / 80
    assert rank.room == pytest.approx(76 - engine.total), "an engine that is awake keeps its memory"
    assert engine_share(shared(True, **{"explorer.engine.gpu_memory_utilization": 0.3}), 80.0) is None
    assert plan_memory(shared(True, **{"explorer.engine.gpu_memory_utilization": 0.3}), 80.0)[0].room == 24
    assert engine_share(config_of(models["qwen3 0.6B"], 2), 80.0) is None
    with pytest.raises(PlacementError, check=about("engines")) as error:
        engine_share(shared(False), 44.0)
    assert "explorer.engine.sleep: true" in error.value.remedy
