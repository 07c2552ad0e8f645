"""What a rank gathers to send or save its weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rayrft.config.trainer import TrainerConfig
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.trainer.loading import Loader, load_policy, rank_mesh
from rayrft.trainer.model import named_weights, save_hf
from rayrft.trainer.policy import Policy
from rayrft.trainer.rank import Rank
from rayrft.weights.buckets import read_bucket
from rayrft.weights.messages import Parcel, TensorMeta
from tests.trainer.learners import CPU
from tests.trainer.ranks import on_ranks


class Gathered(TorchDispatchMode):
    """Counts the bytes that are gathered from all ranks of a replica together."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_gather_into_tensor" in str(func):
            self.nbytes += args[0].nbytes * args[1]
        return func(*args, **(kwargs or {}))


def _policy(folder: str) -> Policy:
    config = TrainerConfig(ranks=dist.get_world_size(), replicas=2 if dist.get_world_size() == 4 else 1)
    loader = Loader(config, rank_mesh("cpu", config.ranks, config.replicas), CPU, torch.bfloat16, seed=0)
    return loader.load(folder, lambda policy: policy)


def _sent(folder: str) -> list[tuple[int, int, int, list[Tensor]]]:
    rank, index, policy = object.__new__(Rank), dist.get_rank(), _policy(folder)
    rank.learner = SimpleNamespace(policy=policy)  # type: ignore[assignment]
    rank._device, rank._channel = CPU, SimpleNamespace(reads=index == 0)  # type: ignore[assignment]
    metas = [TensorMeta.of(name, tensor, torch.bfloat16) for name, tensor in named_weights(policy)]
    parcel = Parcel(metas, 1 << 14, None)
    with Gathered() as gathered:
        buckets = [bucket.clone() for bucket in rank._buckets(parcel)]
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, (gathered.nbytes, sum(each.nbytes for each in buckets), parcel.nbytes, buckets))
    return held


@pytest.mark.parametrize("ranks", [2, 4])
def test_weights_are_gathered_once_as_they_are_sent_and_filled_by_the_rank_that_sends(
    tiny_model: Path, ranks: int
) -> None:
    first, *others = on_ranks(ranks, _sent, str(tiny_model))
    expected = {name: tensor.bfloat16() for name, tensor in named_weights(load_policy(str(tiny_model)))}
    metas = [TensorMeta.of(name, tensor, torch.bfloat16) for name, tensor in expected.items()]
    for gathered, _, sent, buckets in (first, *others):
        assert sent <= gathered <= 1.05 * sent  # uneven shards are padded
        assert len(buckets) > 3
    assert first[1] == sum(meta.padded for meta in metas) and not any(other[1] for other in others)
    found = dict(read_bucket(torch.cat(first[3]), metas))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def _saved(model: str, folder: Path) -> tuple[int, int]:
    policy = _policy(model)
    with Gathered() as gathered:
        save_hf(policy, ChatTokenizer(model), folder, dtype=torch.bfloat16, writer=dist.get_rank() == 0)
    return gathered.nbytes, 2 * sum(tensor.numel() for tensor in policy.state_dict().values())


def test_a_model_is_gathered_and_written_in_the_dtype_that_it_computes_in(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    gathered, expected = on_ranks(2, _saved, str(tiny_model), tmp_path / "saved")
    assert expected <= gathered <= 1.05 * expected
    files = load_file(tmp_path / "saved" / "model.safetensors")
    trained = dict(named_weights(load_policy(str(tiny_model))))
    assert files.keys() == trained.keys()
    assert all(torch.equal(tensor, trained[name].bfloat16()) for name, tensor in files.items())
    assert AutoConfig.from_pretrained(tmp_path / "saved").dtype == torch.bfloat16
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto").dtype == torch.bfloat16
