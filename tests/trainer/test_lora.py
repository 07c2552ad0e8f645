"""A policy with an adapter: what is trained, what the reference is, what is saved and what is loaded again."""

from __future__ import annotations

import shutil
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader

from rayrft.algorithms import build
from rayrft.config import dump_config, load_config
from rayrft.config.trainer import LoraConfig, OptimizerConfig
from rayrft.core.checkpoints import Checkpoints, Progress, export
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ConfigError
from rayrft.trainer.batches import TrainRow
from rayrft.trainer.dcp import Checkpointer
from rayrft.trainer.learner import Learner
from rayrft.trainer.lora import Lora
from rayrft.trainer.model import load_hf, load_policy, named_weights, save_hf, shard
from rayrft.trainer.policy import Policy
from rayrft.trainer.value_model import Critic
from tests.e2e.conftest import small_config
from tests.errors import about
from tests.trainer.ranks import on_ranks
from tests.trainer.test_learner import CPU, make_model
from tests.trainer.test_updates import on_policy, own_rows

ADAPTER = LoraConfig(rank=4, alpha=8)
QUERY = "model.model.layers.0.self_attn.q_proj.weight"
ROWS = [[1, 7, 3, 9, 30, 4], [2, 2, 40]]


def adapt(policy: Policy, compute: torch.dtype = torch.float64, origin: str = "the model") -> Policy:
    policy.lora = Lora(policy.model, ADAPTER, origin=origin, compute=compute, seed=0)
    return policy


def move(policy: Policy) -> Policy:
    """Give the adapter a large effect."""
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=chance) * 0.3)
    return policy


def make_learner(policy: Policy, name: str = "grpo", critic: Critic | None = None, **pieces: Any) -> Learner:
    learner = Learner(policy, micro_batch_tokens=60, temperature=1.0, device=CPU)
    if critic is not None:
        critic.open_stage(OptimizerConfig(lr=1e-2), 10, dist.get_world_size())
    learner.open_stage(build(name, pieces), OptimizerConfig(lr=1e-2), 10, critic=critic)
    return learner


def whole(policy: Policy) -> dict[str, torch.Tensor]:
    return {
        name: (p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()).clone()
        for name, p in policy.named_parameters()
    }


def logprobs(policy: Policy) -> list[list[float]]:
    return Learner(policy, micro_batch_tokens=60, temperature=1.0, device=CPU).score(ROWS)


def assert_alike(found: list[list[float]], expected: list[list[float]], within: float) -> None:
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, abs=within)


def test_an_adapter_begins_without_effect_and_trains_alone() -> None:
    policy = adapt(make_model())
    assert logprobs(policy) == logprobs(make_model())
    learner, before = make_learner(policy), whole(policy)
    learner.step([own_rows()])
    for name, weight in whole(policy).items():
        moved = not torch.equal(weight, before[name])
        # A has no gradient while B is still 0.
        assert moved == (".lora_B." in name), name
    learner.step([own_rows()])
    changed = {name for name, weight in whole(policy).items() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if ".lora_" in name}
    assert len(learner.optimizer.adam.state) == len(changed)


def test_the_reference_is_the_model_without_its_adapter_and_no_copy_of_anything() -> None:
    learner = make_learner(adapt(make_model()), kl="k3", kl_coef=0.1)
    rows = on_policy(learner, own_rows())
    kls = [learner.step([rows]).metrics.kl for _ in range(3)]
    assert kls[0] == 0.0 and 0 < kls[1] < kls[2]
    assert learner.reference is not None and learner.reference.weights == {}
    with learner.reference.active():
        assert logprobs(learner.policy) == logprobs(make_model())
    assert logprobs(learner.policy) != logprobs(make_model())


def test_a_layer_that_is_recomputed_for_the_backward_pass_gives_the_adapter_the_same_gradient() -> None:
    gradients = []
    for checkpointing in (False, True):
        policy = move(adapt(make_model()))
        if checkpointing:
            policy.checkpoint_layers()
        make_learner(policy).gradient(own_rows())
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    torch.testing.assert_close(*gradients)


COMPUTE = {torch.float64: 1e-6, torch.bfloat16: 2e-2}
"""What frozen weights may be held in, and how far results may lie apart."""


def _train_in_each(rows: list[TrainRow]) -> Any:
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    return {compute: _train(compute, mesh, rows) for compute in COMPUTE}


def _train(compute: torch.dtype, mesh: dist.device_mesh.DeviceMesh, rows: list[TrainRow]) -> Any:
    """Two steps of PPO with a KL, in which policy and critic have adapters."""
    size, rank = dist.get_world_size(), dist.get_rank()
    policy = shard(adapt(make_model(), compute), mesh, compute)
    critic = shard(Critic(adapt(make_model(), compute)), mesh, compute)
    learner = make_learner(policy, "ppo", critic, kl="k1", kl_in="reward")
    for _ in range(2):
        result = learner.step([rows[:2] if size > 1 and rank == 0 else rows[2 if size > 1 else 0 :]])
    return result.metrics, whole(policy)


def test_number_of_ranks_changes_nothing(tmp_path: Path) -> None:
    one, two = (on_ranks(ranks, tmp_path, _train_in_each, own_rows()) for ranks in (1, 2))
    for compute, within in COMPUTE.items():
        (result, weights), (other, others) = one[compute], two[compute]
        for name, weight in weights.items():
            torch.testing.assert_close(weight, others[name], atol=within, rtol=0)
            held = torch.promote_types(compute, torch.float32) if ".lora_" in name else compute
            assert weight.dtype == held, name
        for field in ("loss", "grad_norm", "value_loss", "kl"):
            assert getattr(result, field) == pytest.approx(getattr(other, field), abs=within), field


def _save_and_begin_anew(model: str, folder: Path) -> Any:
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    policy = shard(move(adapt(load_policy(model), torch.float32, model)), mesh, torch.float32)
    save_hf(policy, ChatTokenizer(model), folder, writer=dist.get_rank() == 0)
    dist.barrier()
    moved = logprobs(policy)
    load_hf(policy, str(folder))
    with make_learner(policy, kl="k3").reference.active():  # type: ignore[union-attr]
        reference = logprobs(policy)
    assert policy.lora is not None and policy.lora.base == str(folder)
    return moved, logprobs(policy), reference, whole(policy)


def test_a_saved_model_has_its_adapter_merged_and_the_next_adapter_stands_on_it(
    tiny_model: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    saved = tmp_path / "saved"
    moved, after, reference, weights = on_ranks(2, tmp_path, _save_and_begin_anew, str(tiny_model), saved)
    plain = load_policy(str(saved))
    assert set(dict(plain.named_parameters())) == set(dict(load_policy(str(tiny_model)).named_parameters()))
    assert len(AutoTokenizer.from_pretrained(saved)) == len(AutoTokenizer.from_pretrained(tiny_model))
    assert_alike(logprobs(plain), moved, 1e-4)
    assert after == reference, "the new adapter has an effect"
    assert_alike(after, moved, 1e-4)
    assert all(weight.any() != (".lora_B." in name) for name, weight in weights.items())


def test_frozen_weights_that_are_held_rounded_are_written_as_they_are(tiny_model: Path, tmp_path: Path) -> None:
    model = str(tiny_model)
    for compute in (torch.bfloat16, torch.float32):
        policy = move(adapt(load_policy(model), compute, model))
        save_hf(policy, ChatTokenizer(model), tmp_path / str(compute), writer=True)
    rounded, exact = (whole(load_policy(str(tmp_path / str(compute)))) for compute in (torch.bfloat16, torch.float32))
    assert all(torch.equal(weight, rounded[name]) for name, weight in exact.items())
    assert not torch.equal(exact[QUERY], exact[QUERY].bfloat16().float()), "the test tells nothing"


def _run_folder(storage: Path, model: Path) -> Path:
    """A run's folder as far as exports read it."""
    settings = small_config(storage, "run", model={"path": str(model), "max_length": 48})
    config = load_config({**settings, "trainer": {"ranks": 1, "lora": ADAPTER.model_dump()}})
    config.folder.mkdir(parents=True)
    (config.folder / "config.yaml").write_text(dump_config(config))
    return config.folder


def _write_checkpoint(model: str, base: str, run: Path) -> Any:
    """On the weights ``base``, one step from a moved adapter; what a checkpoint of it restores in another learner."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    learner, other = (
        make_learner(shard(adapt(load_policy(model), torch.float32, model), mesh, torch.float32)) for _ in range(2)
    )
    load_hf(learner.policy, base)
    for _ in range(3):
        learner.step([own_rows()])
    checkpoints, written = Checkpoints(run, load_config(run / "config.yaml").checkpoint), threading.Event()
    folder = checkpoints.begin(3)
    Checkpointer().save(learner, None, folder, lambda _: written.set())
    assert written.wait(60)
    Checkpointer().load(other, None, folder)
    checkpoints.commit(Progress("run", step=3))
    both = [asdict(each.step([own_rows()])) for each in (learner, other)]
    assert both[0] == both[1]
    bare = make_learner(shard(adapt(load_policy(model), torch.float32, model), mesh, torch.float32))
    Checkpointer().load_policy(bare.policy, checkpoints.at(3))
    return logprobs(bare.policy)


def test_a_checkpoint_holds_the_adapter_alone_and_is_exported_with_or_without_its_base(
    tiny_model: Path, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = _run_folder(tmp_path, tiny_model)
    base = run / "checkpoints" / "earlier"
    shutil.copytree(tiny_model, base)
    other = load_policy(str(base)).model
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    other.save_pretrained(base)
    expected = on_ranks(1, tmp_path, _write_checkpoint, str(tiny_model), str(base), run)
    run = run.rename(tmp_path / "moved")
    base = run / "checkpoints" / "earlier"
    written = FileSystemReader(str(run / "checkpoints" / "step-000003")).read_metadata().state_dict_metadata
    assert all(".lora_" in name for name in written if name.startswith("policy."))

    assert export(run, tmp_path / "merged") == 3
    assert_alike(logprobs(load_policy(str(tmp_path / "merged"))), expected, 1e-4)
    export(run, tmp_path / "adapter", merged=False)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    assert_alike(logprobs(Policy(model.get_base_model())), expected, 1e-5)
    assert model.peft_config["default"].base_model_name_or_path == str(base)


def _go_on(folder: Path, begin: bool) -> Any:
    """Two steps, a checkpoint and another step; or that step from the checkpoint."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    policy, critic = adapt(make_model()), Critic(adapt(make_model()))
    learner = make_learner(shard(policy, mesh, torch.float32), "ppo", shard(critic, mesh, torch.float32))
    mine = [replace(row, reward=i / 10) for i, row in enumerate(own_rows())][rank::size]
    if begin:
        for _ in range(2):
            learner.step([mine])
        written = threading.Event()
        Checkpointer().save(learner, critic, folder, lambda _: written.set())
        assert written.wait(60)
        dist.barrier()
    else:
        Checkpointer().load(learner, critic, folder)
    return learner.step([mine]), whole(policy)


def test_a_checkpoint_of_an_adapter_is_loaded_on_another_number_of_ranks(tmp_path: Path) -> None:
    expected, moved = on_ranks(2, tmp_path, _go_on, tmp_path / "checkpoint", True)
    found, weights = on_ranks(1, tmp_path, _go_on, tmp_path / "checkpoint", False)
    for name, weight in moved.items():
        torch.testing.assert_close(weights[name], weight, atol=1e-9, rtol=0)
    assert found.metrics.loss == pytest.approx(expected.metrics.loss, abs=1e-9)
    assert found.metrics.value_loss == pytest.approx(expected.metrics.value_loss, abs=1e-6)
    assert all(weight.any() for name, weight in weights.items() if ".lora_B." in name)


def test_a_run_without_an_adapter_cannot_export_one(tmp_path: Path) -> None:
    config = load_config(small_config(tmp_path, "plain"))
    config.folder.mkdir()
    (config.folder / "config.yaml").write_text(dump_config(config))
    with pytest.raises(ConfigError, check=about("merge", False)):
        export(config.folder, tmp_path / "out", merged=False)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "mlp", "nothing"])
def test_what_is_no_linear_layer_of_the_decoder_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, check=about("trainer.lora.targets")):
        Lora(make_model().model, LoraConfig(targets=["q_proj", target]), origin="", compute=torch.float64, seed=0)


def test_targets_by_name_are_the_only_ones() -> None:
    policy = make_model()
    policy.lora = Lora(policy.model, LoraConfig(targets=["q_proj"]), origin="", compute=torch.float64, seed=0)
    names = [name for name, _ in named_weights(policy)]
    assert names[:2] == [f"model.layers.0.self_attn.q_proj.lora_{factor}.weight" for factor in "AB"]
    assert all(".q_proj." in name for name in names) and len(names) == 4


def test_a_reference_that_is_to_be_refreshed_is_refused(tmp_path: Path) -> None:
    settings = {
        "trainer.lora.rank": 4,
        "stages.mix.algorithm.kl": "k3",
        "stages.mix.algorithm.kl_coef": 0.1,
        "stages.mix.update.reference_refresh": 2,
    }
    with pytest.raises(ConfigError, check=about("stages.mix.update.reference_refresh")):
        load_config(small_config(tmp_path, "refreshed"), settings)
