"""What a rank gathers to send or save its weights."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from rayrft.config.trainer import TrainerConfig
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import OutOfMemory
from rayrft.trainer import model as model_module
from rayrft.trainer.blame import device_failed
from rayrft.trainer.loading import Loader, load_policy, rank_mesh, shard
from rayrft.trainer.model import gather, named_weights, save_hf
from rayrft.trainer.policy import Policy
from rayrft.trainer.rank import Rank
from rayrft.weights.channel import WeightChannel
from rayrft.weights.messages import Parcel, TensorMeta
from tests.trainer.families import FAMILIES
from tests.trainer.learners import CPU
from tests.trainer.ranks import as_rank, on_ranks
from tests.weights.transfers import Gathered, counted, open_channel, transfer


def _policy(folder: str, spreads: bool = False) -> Policy:
    ranks = dist.get_world_size()
    config = TrainerConfig(ranks=ranks, replicas=2 if ranks == 4 and not spreads else 1, expert_parallel=spreads)
    loader = Loader(config, rank_mesh("cpu", config.ranks, config.replicas), CPU, torch.bfloat16, seed=0)
    return loader.load(folder, lambda policy: policy)


def _sent(folder: str, spreads: bool) -> list[tuple[int, int, dict[str, Tensor]]]:
    policy = _policy(folder, spreads)
    metas = [TensorMeta.of(name, tensor, torch.bfloat16) for name, tensor in named_weights(policy)]
    parcel = Parcel(metas, 1 << 14)
    with Gathered() as gathered:
        tensors = {name: gather(tensor, torch.bfloat16) for name, tensor in named_weights(policy)}
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, (gathered.nbytes, parcel.nbytes, tensors))
    return held


@pytest.mark.parametrize("place", ["allocate", "fill_bucket"])
def test_memory_that_runs_out_in_a_transfer_is_freed_by_smaller_buckets(
    tiny_model: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, channel, policy = object.__new__(Rank), object.__new__(WeightChannel), load_policy(str(tiny_model))
    transport = SimpleNamespace(send=lambda parcel, buckets: deque(buckets), in_flight=1, close=print)
    vars(channel).update(_announces=False, reads=True, _device=CPU, _transport=transport)
    learner = SimpleNamespace(policy=policy, phase=contextlib.nullcontext)
    vars(rank).update(learner=learner, _channel=channel, _compute=torch.bfloat16)
    monkeypatch.setattr(f"rayrft.weights.buckets.{place}", mock.Mock(side_effect=torch.OutOfMemoryError("CUDA")))
    with pytest.raises(torch.OutOfMemoryError) as raised:
        rank.send(1, 1, 64 << 20)
    failed = device_failed(raised.value, 3, "node-1", TrainerConfig(ranks=4))
    assert isinstance(failed, OutOfMemory) and "in sending weights" in failed.problem
    assert "lower weight_sync.bucket_mib (64)" in failed.remedy


@pytest.mark.parametrize(("ranks", "spreads"), [(2, False), (4, False), (2, True)])
def test_weights_are_gathered_once_as_they_are_sent(
    tiny_model: Path, ranks: int, spreads: bool, tmp_path: Path
) -> None:
    folder = tmp_path if spreads else tiny_model
    if spreads:
        AutoModelForCausalLM.from_config(FAMILIES["qwen3 moe"]).save_pretrained(tmp_path)
    expected = {name: tensor.bfloat16() for name, tensor in named_weights(load_policy(str(folder)))}
    for gathered, sent, found in on_ranks(ranks, _sent, str(folder), spreads):
        assert sent <= gathered <= 1.05 * sent  # uneven shards are padded
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def _transferred(folder: str) -> tuple[list[dict[str, int]], int, dict[str, Tensor]]:
    """Send a model from two ranks, which have a part each; return what each of them and the receiver moved, the bytes
    that there are, and the weights loaded."""
    last, parts = dist.get_world_size() - 1, DeviceMesh("cpu", [0, 1])
    policy = load_policy(folder)
    metas = [TensorMeta.of(name, tensor, torch.bfloat16) for name, tensor in named_weights(policy)]
    if dist.get_rank() < last:
        policy = load_policy(folder, prepare=lambda each: shard(each, parts, torch.float32))
        weights = dict(named_weights(policy))
    else:
        weights = {meta.name: torch.zeros(meta.shape, dtype=torch.bfloat16) for meta in metas}
    channel = open_channel()
    with counted() as counts:
        counts["loaded"] = transfer(channel, 1, Parcel(metas, 1 << 14), weights)
    channel.close()
    moved: list[Any] = [None] * (last + 1)
    dist.all_gather_object(moved, (dict(counts), weights if dist.get_rank() == last else {}))
    return [each for each, _ in moved], sum(meta.padded for meta in metas), moved[last][1]


def test_each_byte_is_gathered_sent_digested_and_loaded_once(tiny_model: Path) -> None:
    (first, second, receiver), size, loaded = on_ranks(3, _transferred, str(tiny_model))
    assert (first["digested"], first["broadcast"]) == (receiver["digested"], receiver["broadcast"]) == (size, size)
    assert not second.get("digested") and not second.get("broadcast"), "nobody reads what it could fill"
    assert size <= first["gathered"] == second["gathered"] <= 1.05 * size and not receiver["gathered"]
    assert receiver["loaded"] == sum(tensor.nbytes for tensor in loaded.values())
    expected = dict(named_weights(load_policy(str(tiny_model))))
    assert all(torch.equal(loaded[name], tensor.bfloat16()) for name, tensor in expected.items())


def _gathered_elsewhere() -> None:
    mesh = init_device_mesh("cpu", (2,))
    shards = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    mesh._device_type = "meta"
    whole = gather(shards, torch.bfloat16)
    assert (whole.device.type, whole.dtype, whole.shape) == ("meta", torch.bfloat16, (4, 4))


def test_shards_in_the_hosts_memory_are_gathered_on_the_device_that_computes() -> None:
    as_rank(0, 2, _gathered_elsewhere)


def _gathered_alone() -> bool:
    sharded = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (1,)), [Shard(0)])
    return gather(sharded, torch.bfloat16).data_ptr() == sharded.to_local().data_ptr()


def test_a_weight_that_a_rank_has_whole_is_copied_into_its_bucket_alone() -> None:
    assert on_ranks(1, _gathered_alone) and gather(weight := torch.ones(2), torch.bfloat16) is weight


def _saved_in_parts(models: dict[str, Path], tokenizer: str, to: Path) -> list[dict[str, int]]:
    """Save models whose size is above what one rank writes; give the bytes that each rank has written of each."""
    held, write = dict[str, int](), model_module.save_file

    def counted(state: dict[str, Tensor], *arguments: Any) -> None:
        held[family] = sum(tensor.nbytes for tensor in state.values())
        write(state, *arguments)

    with mock.patch.object(model_module, "ONE_FILE", 1000), mock.patch.object(model_module, "save_file", counted):
        for family, folder in models.items():
            policy = _policy(str(folder), spreads=family == "spread")
            save_hf(policy, ChatTokenizer(tokenizer), to / family, dtype=torch.bfloat16)()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, held)
    return found


def test_every_rank_writes_its_part_of_a_large_model(tiny_model: Path, tiny_vision_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    models = {"vision": tiny_vision_model}
    for family in ("qwen3, tied", "qwen3 moe"):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(tmp_path / "models" / family)
        models[family] = tmp_path / "models" / family
    models["spread"] = models["qwen3 moe"]  # its experts are on different ranks
    first, second = on_ranks(2, _saved_in_parts, models, str(tiny_model), tmp_path)
    for family, folder in models.items():
        kind = AutoModelForImageTextToText if family == "vision" else AutoModelForCausalLM
        assert 0.5 < first[family] / second[family] < 2
        begun, found = kind.from_pretrained(folder).state_dict(), kind.from_pretrained(tmp_path / family)
        assert all(torch.equal(begun[name].bfloat16(), tensor) for name, tensor in found.state_dict().items())
        names = {file.name for file in (tmp_path / family).glob("*.safetensors")}
        assert names == {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
        index = json.loads((tmp_path / family / "model.safetensors.index.json").read_text())
        assert {*index["weight_map"].values()} == names
        assert index["metadata"]["total_size"] == sum(each.nbytes for each in _read(tmp_path / family, names))
    assert not list(tmp_path.glob(".*")), "parts are gone"


def _read(folder: Path, names: set[str]) -> list[Tensor]:
    return [tensor for name in names for tensor in load_file(folder / name).values()]


def _saved(model: str, folder: Path) -> tuple[int, int]:
    policy = _policy(model)
    with Gathered() as gathered:
        save_hf(policy, ChatTokenizer(model), folder, dtype=torch.bfloat16)()
    return gathered.nbytes, 2 * sum(tensor.numel() for tensor in policy.state_dict().values())


def test_a_model_is_gathered_and_written_in_the_dtype_that_it_computes_in(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig

    gathered, expected = on_ranks(2, _saved, str(tiny_model), tmp_path / "saved")
    assert expected <= gathered <= 1.05 * expected
    files = load_file(tmp_path / "saved" / "model.safetensors")
    trained = dict(named_weights(load_policy(str(tiny_model))))
    assert files.keys() == trained.keys()
    assert all(torch.equal(tensor, trained[name].bfloat16()) for name, tensor in files.items())
    assert AutoConfig.from_pretrained(tmp_path / "saved").dtype == torch.bfloat16
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto").dtype == torch.bfloat16
