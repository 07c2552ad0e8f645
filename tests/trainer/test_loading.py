"""A rank's model is its part of the weights in the files, in memory for that part, and the parts are the whole."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedConfig, Qwen3Config

from rayrft.config.trainer import LoraConfig, OptimizerConfig, TrainerConfig
from rayrft.errors import ModelError
from rayrft.trainer.dcp import Checkpointer
from rayrft.trainer.learner import Learner
from rayrft.trainer.loading import FastPaths, Loader, expert_mesh, load_hf, load_policy, rank_mesh, shard
from rayrft.trainer.memory import RankMemory, rank_memory, shape_of
from rayrft.trainer.optimizer import Optimizer
from rayrft.trainer.policy import Policy, scored_batch
from rayrft.trainer.reward_model import RewardClassifier
from rayrft.trainer.value_model import Critic
from rayrft.weights.buckets import plan_buckets
from rayrft.weights.messages import TensorMeta
from tests.trainer.families import FAMILIES, SHAPES, SMALL
from tests.trainer.learners import CPU, full, make_learner, mine, own_rows, weights, write
from tests.trainer.ranks import as_rank, on_ranks

SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
ROWS = [torch.tensor([1, 7, 3, 9, 30, 4, 60]), torch.tensor([2, 2, 40])]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_vision_model: Path) -> dict[str, Path]:
    """Models of every family, in several files each, with weights in half precision."""
    made = {"qwen2-vl": tiny_vision_model}
    for family, config in FAMILIES.items():
        torch.manual_seed(0)
        made[family] = tmp_path_factory.mktemp("model")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(made[family], max_shard_size="20KB")
        assert len(list(made[family].glob("*.safetensors"))) > 2
    return made


def mesh() -> Any:
    """Of four ranks two are replicas of the others."""
    return rank_mesh("cpu", ranks := dist.get_world_size(), 2 if ranks == 4 else 1)


def logprobs(policy: Policy) -> Tensor:
    return policy.output(scored_batch(ROWS), temperature=1.0).logprobs.detach()


def gradients(policy: Policy) -> dict[str, Tensor | None]:
    """The gradient of the sum of log-probs that are different from rank to rank in nothing."""
    policy.output(scored_batch(ROWS), temperature=1.0).logprobs.sum().backward()
    return {name: None if each.grad is None else full(each.grad) for name, each in policy.named_parameters()}


def _loaded(folder: str, spreads: bool) -> Any:
    """The parts of a sharded model, put together, its buffers, gradients, and the class and config of the model."""
    experts = expert_mesh("cpu", dist.get_world_size()) if spreads else None
    ranks = rank_mesh("cpu", dist.get_world_size(), 1) if spreads else mesh()
    policy = load_policy(folder, prepare=lambda policy: shard(policy, ranks, torch.float32, experts=experts))
    assert all(isinstance(each, DTensor) and each.dtype == torch.float32 for each in policy.parameters())
    size, ranks = sum(each.numel() for each in policy.parameters()), mesh().size(-1)
    own = sum(each.to_local().numel() for each in policy.parameters())  # type: ignore[attr-defined]
    assert own < 1.6 * size / ranks, "about its part: four experts on three ranks are not alike"
    whole = {name: full(each) for name, each in policy.named_parameters()}
    return whole, dict(policy.named_buffers()), gradients(policy), type(policy.model), policy.model.config.to_dict()


@pytest.mark.parametrize(
    ("family", "ranks", "spreads"),
    [
        *((family, 3, False) for family in (*FAMILIES, "qwen2-vl")),
        ("qwen3, tied", 4, False),
        ("qwen3 moe", 4, False),
        ("qwen3 moe", 2, True),
        ("qwen3 moe", 4, True),
    ],
)
def test_the_parts_of_all_ranks_are_the_whole_model(
    folders: dict[str, Path], family: str, ranks: int, spreads: bool
) -> None:
    whole = load_policy(str(folders[family]))
    weights, buffers, found, kind, config = on_ranks(ranks, _loaded, str(folders[family]), spreads)
    assert weights.keys() == dict(whole.named_parameters()).keys()
    assert all(torch.equal(each, weights[name]) for name, each in whole.named_parameters())
    assert buffers.keys() == dict(whole.named_buffers()).keys()
    assert all(torch.equal(each, buffers[name]) for name, each in whole.named_buffers())
    for name, gradient in gradients(whole).items():
        torch.testing.assert_close(found[name], gradient, atol=1e-4, rtol=1e-4)
    own = AutoModelForCausalLM.from_pretrained(folders[family]) if family in FAMILIES else whole.model
    assert kind is type(whole.model) is type(own) and config == whole.model.config.to_dict()
    assert "distributed_config" not in config


def loader(**settings: Any) -> Loader:
    return Loader(TrainerConfig(ranks=dist.get_world_size(), **settings), mesh(), CPU, torch.bfloat16, seed=5)


def _kinds(folder: str) -> None:
    whole = load_policy(folder)
    exact = {name: each.detach() for name, each in whole.named_parameters()}
    rounded = {name: each.bfloat16() for name, each in exact.items()}

    def assert_weights(model: nn.Module, expected: dict[str, Tensor], trained: Callable[[str], bool]) -> None:
        for name, each in model.named_parameters():
            assert torch.equal(full(each), expected[name]) and each.requires_grad == trained(name), name

    plain, adapting = loader(head_chunk=100, compile="layers"), loader(lora=LoraConfig(rank=2, targets=["q_proj"]))
    policy = plain.load(folder, lambda policy: policy)
    assert policy.packs and policy.chunks_head and policy.head_chunk == 100
    compiled = [name for name, each in policy.named_modules() if each._compiled_call_impl is not None]
    assert compiled == [f"model.model.layers.{layer}" for layer in range(3)]
    assert_weights(policy, exact, lambda name: True)
    teacher = adapting.load(folder, lambda policy: policy, field="teacher", frozen=True)
    assert_weights(teacher, rounded, lambda name: False)
    torch.testing.assert_close(logprobs(teacher), logprobs(whole), atol=0.1, rtol=0.1)

    head = {"head.weight": torch.zeros(1, 32)}
    bodies = {name.removeprefix("model."): each for name, each in exact.items()}
    for scorer in (plain.load(folder, Critic), plain.load(folder, lambda policy: RewardClassifier(policy, None))):
        assert_weights(scorer, bodies | head, lambda name: True)

    adapted = adapting.load(folder, lambda policy: policy)
    assert adapted.lora is not None
    factors = {f"model.{name}": each for name, each in adapted.lora.initial_factors().items()}
    frozen = {name.replace("q_proj.", "q_proj.base_layer."): each for name, each in rounded.items()}
    assert_weights(adapted, frozen | factors, lambda name: ".lora_" in name)
    again = adapting.load(folder, Critic)
    bodies = {name.removeprefix("model."): each for name, each in (frozen | factors).items()}
    assert_weights(again, bodies | head, lambda name: ".lora_" in name or name == "head.weight")


def test_critics_reward_models_adapters_and_teachers_are_read_in_parts_too(folders: dict[str, Path]) -> None:
    on_ranks(2, _kinds, str(folders["llama"]))


def _judging(folder: str, fails: bool) -> FastPaths | str:
    """What ranks know of a model's fast paths, of which the first alone may look at the model."""
    found = loader()
    seen: list[tuple[int, list[str]]] = []

    def judge(policy: Policy, **given: Any) -> None:
        config = policy.model.config
        seen.append((len(policy.model.model.layers), list(config.layer_types)))
        assert all(each.isfinite().all() and each.device == CPU for each in policy.parameters())
        policy.packs = True

    with mock.patch.object(Policy, "enable_fast_paths", judge if dist.get_rank() == 0 else None):
        try:
            paths = found.fast_paths(f"{folder}/none" if fails else folder)
        except ModelError as error:
            return str(error)
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    assert seen == ([(6, kinds)] if dist.get_rank() == 0 else []), "one layer of each kind, and no more"
    assert found.fast_paths(folder) == paths, "which are looked for once"
    return paths


def test_the_first_rank_looks_for_fast_paths_on_one_layer_of_each_kind(tmp_path: Path) -> None:
    config = Gemma3TextConfig(**{**SMALL, "num_hidden_layers": 12}, head_dim=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert on_ranks(2, _judging, str(tmp_path), False) == FastPaths(packs=True, chunks_head=False, warning=None)
    assert "no causal language model can be loaded" in on_ranks(2, _judging, str(tmp_path), True)


MIB = 2**20


def _within(folder: str, room: int, whole: bool) -> str:
    """Load a model's part, or the whole, in so many bytes of memory more than this process has."""
    torch.zeros(MIB).bfloat16()  # what torch allocates once
    used = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmData")
    )
    resource.setrlimit(resource.RLIMIT_DATA, (used + room, used + room))
    try:
        load_policy(
            folder, prepare=(lambda policy: None) if whole else lambda policy: shard(policy, mesh(), torch.bfloat16)
        )
    except (RuntimeError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_has_memory_for_its_part_and_one_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    sizes = {"vocab_size": 8000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
    config = Qwen3Config(**sizes, num_attention_heads=12, num_key_value_heads=12, head_dim=64)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    numbers = sum(each.numel() for each in model.parameters())
    files, part, root = 2 * numbers, 4 * numbers // 8, 2 * 4 * 8000 * 768
    room = files + part + root + 64 * MIB  # files are mapped
    assert room + 100 * MIB < files + 4 * numbers, "the whole model would fit"
    assert as_rank(3, 8, _within, str(tmp_path), room, False) == ""
    assert as_rank(3, 8, _within, str(tmp_path), room, True) != ""


RANKS = (2, 8, 12, 16, 32, 512)


@pytest.mark.parametrize("ranks", [12, 512])  # rows that 512 ranks share evenly are so on their divisors
def test_states_of_large_models_are_shared_evenly(ranks: int) -> None:
    as_rank(0, ranks, _shares)


def _shares() -> None:
    """The first rank, whose part is the largest, has at most 2 % more than its share of the weights."""
    for name, config in SHAPES.items():
        with torch.device("meta"):
            policy = Policy(AutoModelForCausalLM.from_config(config))
        numbers = sum(each.numel() for each in policy.parameters())
        shard(policy, mesh(), torch.bfloat16)
        own = sum(each.to_local().numel() for each in policy.parameters())  # type: ignore[attr-defined]
        assert own <= 1.02 * numbers / dist.get_world_size(), name


STEPS = [
    pytest.param(name, ranks, marks=[] if (name, ranks) == ("qwen3 0.6B", 2) else pytest.mark.slow)
    for name in SHAPES
    for ranks in RANKS
]


@pytest.mark.parametrize(("name", "ranks"), STEPS)
def test_a_step_of_a_large_model_needs_the_memory_of_the_plan(name: str, ranks: int, tmp_path: Path) -> None:
    SHAPES[name].save_pretrained(tmp_path)
    planned = rank_memory(shape_of(str(tmp_path)), TrainerConfig(ranks=ranks, accumulate="sharded"), half=True)
    as_rank(0, ranks, _bytes_of_a_step, name, planned)


def _bytes_of_a_step(name: str, planned: RankMemory) -> None:
    """What the first rank holds after it has loaded, after a micro-batch, and after a step; tensors have no data."""
    batch, ranks = scored_batch([torch.arange(64)]), mesh()
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("meta"):
            policy = Policy(AutoModelForCausalLM.from_config(SHAPES[name]))
        policy.use(packs=False, chunks_head=True)
        shard(policy, ranks, torch.bfloat16).to_empty(device="cpu")
        optimizer = Optimizer([*policy.parameters()], OptimizerConfig(), steps=1, updates_per_step=1)
        weights = _held(policy.parameters())
        policy.output(batch, temperature=1.0).logprobs.mean().backward()
        gradients = _held(each.grad for each in policy.parameters())
        optimizer.adam.step()
        moments = _held(each for state in optimizer.adam.state.values() for each in state.values())
    assert weights + moments <= 1.02 * planned.states and gradients <= 1.02 * planned.gradients


def _held(tensors: Iterable[Any]) -> int:
    return sum(each.to_local().nbytes if isinstance(each, DTensor) else each.nbytes for each in tensors)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [("qwen3 8B", 32), ("qwen3 32B", 512), ("llama 70B", 512)])
def test_a_rank_of_many_has_memory_for_its_part_of_a_large_model_and_one_layer(
    name: str, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    files, numbers = _sparse(SHAPES[name], tmp_path)
    part, layer = 4 * numbers // ranks, 4 * shape_of(str(tmp_path)).layer
    assert as_rank(0, ranks, _within, str(tmp_path), files + part + layer, False) == ""
    assert as_rank(0, ranks, _within, str(tmp_path), files + part // 2, False) != "", "the limit would not count"


def _sparse(config: PreTrainedConfig, folder: Path) -> tuple[int, int]:
    """Write a model whose files of weights are holes, which take no room; return the bytes and the numbers in them."""
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights = dict(model.named_parameters())
    metas = [TensorMeta.of(parameter, each, torch.bfloat16) for parameter, each in weights.items()]
    names: dict[str, str] = {}
    for number, part in enumerate(plan_buckets(metas, 4 << 30)):
        header, end = dict[str, Any](__metadata__={"format": "pt"}), 0
        for meta in part:
            names[meta.name] = f"model-{number}.safetensors"
            offsets = [end, end := end + meta.nbytes]
            header[meta.name] = {"dtype": "BF16", "shape": meta.shape, "data_offsets": offsets}
        text = json.dumps(header).encode()
        with (folder / f"model-{number}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    numbers = sum(each.numel() for each in weights.values())
    return 2 * numbers, numbers


def _trained(folder: str, checkpoint: Path, ways: list[str]) -> dict[str, list[Tensor]]:
    """The weights after two steps, after a step on from a checkpoint, and those of a folder, of a model that was read
    in parts, perhaps with its experts spread over the ranks, and of one that was sharded when it was whole."""
    found: dict[str, list[Tensor]] = {}
    for way in ways:
        experts = expert_mesh("cpu", dist.get_world_size()) if way == "experts" else None

        def prepare(policy: Policy, way: str = way, experts: DeviceMesh | None = experts) -> None:
            if way == "experts":
                policy.checkpoint_layers()  # tokens travel once more in the backward pass
            if way != "whole":
                shard(policy, mesh(), torch.float32, experts=experts)

        def learner(way: str = way, prepare: Callable[[Policy], None] = prepare) -> Learner:
            policy = load_policy(folder, prepare=prepare)
            policy.use(packs=True, chunks_head=True)
            return make_learner("grpo", policy=shard(policy, mesh(), torch.float32) if way == "whole" else policy)

        first, rows = learner(), mine(own_rows())
        first.step([rows])
        assert write(first, checkpoint / way, rows) == [None]
        second = learner()
        Checkpointer().load(second, checkpoint / way)
        norm = second.step([rows]).metrics.grad_norm
        found[way] = [weights(first), weights(second), torch.tensor(norm)]
        load_hf(second.policy, folder)
        found[way].append(weights(second))
    return found


@pytest.mark.parametrize(
    ("family", "ways", "atol"),
    [
        ("qwen3, tied", ["whole", "parts"], 1e-6),
        ("llama", ["whole", "parts"], 1e-6),
        ("qwen3 moe", ["parts", "experts"], 1e-5),
    ],
)
def test_a_model_that_was_read_in_parts_trains_and_goes_on(
    folders: dict[str, Path], family: str, ways: list[str], atol: float, tmp_path: Path
) -> None:
    """Tokens are summed in another order where they travel to experts, which AdamW enlarges for a few weights."""
    found = on_ranks(2, _trained, str(folders[family]), tmp_path, ways)
    (trained, _, norm, read), others = found[ways[0]], found[ways[1]]
    assert (trained - read).abs().max() > 1e-4
    for each, expected in zip(others, (trained, trained, norm, read), strict=True):
        torch.testing.assert_close(each, expected, atol=atol, rtol=0)
    torch.testing.assert_close(others[1], others[0], atol=1e-6, rtol=0)


def _refused(folder: str) -> str:
    with pytest.raises(ModelError) as raised:
        Loader(
            TrainerConfig(ranks=dist.get_world_size(), expert_parallel=True), mesh(), CPU, torch.float32, seed=0
        ).load(folder, lambda policy: policy)
    return str(raised.value)


@pytest.mark.parametrize(("family", "why"), [("llama", "no experts"), ("qwen3 moe", "Cannot evenly shard 4 experts")])
def test_experts_that_ranks_cannot_share_are_named(folders: dict[str, Path], family: str, why: str) -> None:
    refused = on_ranks(3, _refused, str(folders[family]))
    assert why in refused and "trainer.expert_parallel" in refused and "trainer.ranks" in refused
