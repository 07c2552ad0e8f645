"""A policy with an adapter: what is trained, what the reference is, what is saved and what is loaded again."""

from __future__ import annotations

import shutil
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

from rayrft.config import load_config
from rayrft.config.trainer import LoraConfig, TrainerConfig
from rayrft.core.checkpoints import Checkpoints, Progress, export
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ConfigError
from rayrft.files import Room
from rayrft.trainer import model as model_module
from rayrft.trainer.dcp import Checkpointer
from rayrft.trainer.learner import Learner
from rayrft.trainer.loading import Loader, load_hf, load_policy, rank_mesh, shard
from rayrft.trainer.lora import Lora
from rayrft.trainer.model import named_weights, save_hf
from rayrft.trainer.policy import Policy
from rayrft.weights.nf4 import dequantise, quantise
from tests.core.given import run_folder
from tests.errors import about
from tests.trainer.learners import ADAPTER, CPU, adapt, full, make_learner, make_model, move, on_policy, own_rows, write
from tests.trainer.ranks import on_ranks

QUERY = "model.model.layers.0.self_attn.q_proj.weight"
FROZEN = "trainer.lora.frozen"
QUANTISED = ADAPTER.model_copy(update={"frozen": "nf4"})
ROWS = [[1, 7, 3, 9, 30, 4], [2, 2, 40]]


def all_of(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: full(parameter).clone() for name, parameter in policy.named_parameters()}


def logprobs(policy: Policy) -> list[list[float]]:
    return Learner(policy, TrainerConfig(micro_batch_tokens=60), temperature=1.0, device=CPU).score(ROWS)


def assert_alike(found: list[list[float]], expected: list[list[float]], within: float) -> None:
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, abs=within)


def test_an_adapter_begins_without_effect_and_trains_alone() -> None:
    policy = adapt(make_model())
    assert logprobs(policy) == logprobs(make_model())
    learner, before = make_learner("grpo", policy=policy), all_of(policy)
    learner.step([own_rows()])
    for name, weight in all_of(policy).items():
        moved = not torch.equal(weight, before[name])
        # A has no gradient while B is still 0.
        assert moved == (".lora_B." in name), name
    learner.step([own_rows()])
    changed = {name for name, weight in all_of(policy).items() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if ".lora_" in name}
    assert len(learner.optimizer.adam.state) == len(changed)


def test_the_reference_is_the_model_without_its_adapter_and_no_copy_of_anything() -> None:
    learner = make_learner("grpo", {"kl": "k3", "kl_coef": 0.1}, policy=adapt(make_model()))
    rows = on_policy(learner, own_rows())
    kls = [learner.step([rows]).metrics.kl for _ in range(3)]
    assert kls[0] == 0.0 and 0 < kls[1] < kls[2]
    assert learner.reference is not None and learner.reference.weights == {}
    with learner.reference.active():
        assert logprobs(learner.policy) == logprobs(make_model())
    assert logprobs(learner.policy) != logprobs(make_model())


def _save_and_load(model: str, folder: Path) -> Any:
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    policy = shard(move(adapt(load_policy(model), torch.float32, model), 0.3), mesh, torch.float32)
    save_hf(policy, ChatTokenizer(model), folder, dtype=torch.float32)()
    dist.barrier()
    moved = logprobs(policy)
    load_hf(policy, str(folder))
    with make_learner("grpo", {"kl": "k3"}, policy=policy).reference.active():  # type: ignore[union-attr]
        reference = logprobs(policy)
    assert policy.lora is not None and policy.lora.base == str(folder)
    return moved, logprobs(policy), reference, all_of(policy)


def test_a_saved_model_has_its_adapter_merged_and_takes_the_next(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    saved = tmp_path / "saved"
    moved, after, reference, weights = on_ranks(2, _save_and_load, str(tiny_model), saved)
    plain = load_policy(str(saved))
    assert set(dict(plain.named_parameters())) == set(dict(load_policy(str(tiny_model)).named_parameters()))
    assert len(AutoTokenizer.from_pretrained(saved)) == len(AutoTokenizer.from_pretrained(tiny_model))
    assert_alike(logprobs(plain), moved, 1e-4)
    assert after == reference, "the new adapter has an effect"
    assert_alike(after, moved, 1e-4)
    assert all(weight.any() != (".lora_B." in name) for name, weight in weights.items())


def _in_4_bits(model: str, rounded: str, folder: Path, compute: torch.dtype) -> None:
    """Weights in 4 bits beside the same ones in the compute dtype: loaded, trained, saved, loaded again."""
    mesh = rank_mesh("cpu", dist.get_world_size(), 1)
    policies = [
        move(
            Loader(TrainerConfig(ranks=mesh.size(), lora=lora), mesh, CPU, compute, 5).load(path, lambda each: each),
            0.3,
        )
        for path, lora in ((model, QUANTISED), (rounded, ADAPTER))
    ]
    held, plain = (dict(policy.named_parameters()) for policy in policies)
    for name, weight in held.items():
        adapted = name.endswith("base_layer.weight")
        assert not adapted or weight.to_local().nbytes == plain[name].to_local().numel() * (
            1 / 2 + compute.itemsize / 64
        )
        assert torch.equal(dequantise(full(weight)) if adapted else full(weight), full(plain[name])), name
    both = [logprobs(policy) for policy in policies]
    assert both[0] == both[1]
    assert both[0] != logprobs(load_policy(model)), "the adapter has no effect"
    for policy in policies:
        make_learner("grpo", policy=policy).step([own_rows()])
    assert all(torch.equal(full(weight), full(plain[name])) for name, weight in held.items() if ".lora_" in name)
    for policy, name in zip(policies, ("ours", "theirs"), strict=True):
        save_hf(policy, ChatTokenizer(model), folder / name, dtype=torch.float32)()
    dist.barrier()
    load_hf(policies[0], str(folder / "ours"))
    merged = load_policy(str(folder / "ours"))
    again = dict(policies[0].named_parameters())
    for name, weight in merged.named_parameters():
        inserted = again.get(name.replace(".weight", ".base_layer.weight"))
        expected = weight.detach().to(compute)
        if inserted is not None:  # as bytes: codes may look like numbers that do not equal themselves
            assert full(inserted).view(torch.uint8).equal(quantise(expected).view(torch.uint8)), name
        else:
            assert torch.equal(full(again[name]), expected), name


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
def test_a_base_in_4_bits_trains_and_is_saved_as_the_same_base_rounded_is(
    tiny_model: Path, tmp_path: Path, compute: torch.dtype
) -> None:
    rounded = load_policy(str(tiny_model))
    for module in rounded.model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = dequantise(quantise(module.weight.data.to(compute))).float()
    save_hf(rounded, ChatTokenizer(tiny_model), tmp_path / "rounded", dtype=torch.float32)()
    on_ranks(2, _in_4_bits, str(tiny_model), str(tmp_path / "rounded"), tmp_path, compute)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


def test_layers_that_are_no_blocks_of_4_bits_wide_are_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"64 inputs, and model\.layers\.0\.self_attn\.q_proj has 16", check=about(FROZEN)
    ):
        adapt(make_model(), config=QUANTISED)


def test_frozen_weights_that_are_held_rounded_are_written_as_they_are(tiny_model: Path, tmp_path: Path) -> None:
    model = str(tiny_model)
    for compute in (torch.bfloat16, torch.float32):
        policy = move(adapt(load_policy(model), compute, model), 0.3)
        save_hf(policy, ChatTokenizer(model), tmp_path / str(compute), dtype=torch.float32)()
    rounded, exact = (all_of(load_policy(str(tmp_path / str(compute)))) for compute in (torch.bfloat16, torch.float32))
    assert all(torch.equal(weight, rounded[name]) for name, weight in exact.items())
    assert not torch.equal(exact[QUERY], exact[QUERY].bfloat16().float()), "the test tells nothing"
    policy = move(adapt(load_policy(model), torch.bfloat16, model), 0.3)
    save_hf(policy, ChatTokenizer(model), tmp_path / "half", dtype=torch.bfloat16)()
    half = all_of(load_policy(str(tmp_path / "half")))
    assert all(torch.equal(half[name], weight.bfloat16().float()) for name, weight in exact.items()), "rounded twice"


def _export_beside_training(model: str, folder: Path, compute: torch.dtype, one_file: int, again: bool) -> list[Any]:
    """Take a step while an export waits to be written; with ``again`` its first file meets a full disk."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    policy = shard(move(adapt(load_policy(model), compute, model), 0.3), mesh, compute)
    learner, checkpointer = make_learner("grpo", policy=policy), Checkpointer()
    trained, written, said, write_file = threading.Event(), threading.Event(), list[str | None](), save_file
    refusals = [1] if again and dist.get_rank() == 1 else []

    def refusing(*arguments: Any) -> None:
        if refusals:
            refusals.pop()
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        write_file(*arguments)

    with (
        mock.patch.object(model_module, "ONE_FILE", one_file),
        mock.patch.object(model_module, "save_file", refusing),
        mock.patch.multiple(Room, poll_s=0.0, limit_s=60.0),
    ):
        write = save_hf(policy, ChatTokenizer(model), folder, dtype=compute, group=checkpointer.group)
        checkpointer.write(
            lambda: (trained.wait(60), write())[1], lambda problem: (said.append(problem), written.set())[1]
        )
        before = all_of(policy)
        learner.step([own_rows()])
        assert any(not torch.equal(weight, before[name]) for name, weight in all_of(policy).items())
        trained.set()
        assert written.wait(60)
    return [said, refusals]


@pytest.mark.parametrize(("ranks", "parts", "again"), [(1, 1, False), (2, 1, False), (2, 2, True)])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_an_adapter_is_exported_as_it_was_while_training_continues(
    tiny_model: Path, tmp_path: Path, compute: torch.dtype, ranks: int, parts: int, again: bool
) -> None:
    model, out, alone = str(tiny_model), tmp_path / "out", tmp_path / "alone"
    save_hf(move(adapt(load_policy(model), compute, model), 0.3), ChatTokenizer(model), alone, dtype=compute)()
    one_file = 1 << 30 if parts == 1 else 1000
    assert on_ranks(ranks, _export_beside_training, model, out, compute, one_file, again) == [[None], []]
    files = sorted(out.glob("*.safetensors"))
    assert len(files) == parts and not list(tmp_path.glob(".*")), "parts are gone"
    if parts == 1:
        assert files[0].read_bytes() == (alone / "model.safetensors").read_bytes()
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    expected = load_file(alone / "model.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def _write_checkpoint(model: str, base: str, run: Path, adapter: LoraConfig) -> Any:
    """On the weights ``base``, one step from a moved adapter; what a checkpoint of it restores in another learner."""
    learner, other, bare = (
        make_learner("grpo", policy=adapt(load_policy(model), torch.float32, model, adapter), sharded=True)
        for _ in range(3)
    )
    load_hf(learner.policy, base)
    for _ in range(3):
        learner.step([own_rows()])
    checkpoints = Checkpoints(run, load_config(run / "config.yaml").checkpoint)
    folder = checkpoints.begin(3)
    assert write(learner, folder, own_rows()) == [None]
    Checkpointer().load(other, folder)
    checkpoints.commit(Progress("run", step=3))
    other.step([own_rows()])
    both = [asdict(each.step([own_rows()])) for each in (learner, other)]
    assert both[0] == both[1]
    Checkpointer().load_policy(bare.policy, checkpoints.at(3))
    return logprobs(bare.policy)


@pytest.mark.parametrize("adapter", [ADAPTER, QUANTISED])
def test_a_checkpoint_is_the_adapter_alone_and_exported_with_or_without_base(
    tiny_model: Path, tmp_path: Path, adapter: LoraConfig
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    changes: dict[str, Any] = {"model": {"path": str(tiny_model), "max_length": 48}}
    run = run_folder(tmp_path, "run", **changes, trainer={"ranks": 1, "lora": adapter.model_dump()}).folder
    base = run / "checkpoints" / "earlier"
    shutil.copytree(tiny_model, base)
    other = load_policy(str(base)).model
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    other.save_pretrained(base)
    expected = on_ranks(1, _write_checkpoint, str(tiny_model), str(base), run, adapter)
    run = run.rename(tmp_path / "moved")
    base = run / "checkpoints" / "earlier"
    written = FileSystemReader(str(run / "checkpoints" / "step-000003")).read_metadata().state_dict_metadata
    assert all(".lora_" in name for name in written if name.startswith("policy."))

    assert export(run, tmp_path / "merged") == 3
    assert_alike(logprobs(load_policy(str(tmp_path / "merged"))), expected, 1e-4)
    export(run, tmp_path / "adapter", merged=False)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    if adapter is ADAPTER:  # other factors were trained beside rounded weights
        assert_alike(logprobs(Policy(model.get_base_model())), expected, 1e-5)
    assert model.peft_config["default"].base_model_name_or_path == str(base)


def test_a_run_without_an_adapter_cannot_export_one(tmp_path: Path) -> None:
    run = run_folder(tmp_path, "plain").folder
    with pytest.raises(ConfigError, check=about("merge", False)):
        export(run, tmp_path / "out", merged=False)


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
