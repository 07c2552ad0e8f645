"""The policy gives the log-probs of the model that it wraps, or says why it does not take its shorter ways; its chunked
head gives the numbers and the gradients of the plain one, in less memory."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    NanoChatConfig,
    OpenAIGPTConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rayrft.errors import ModelError
from rayrft.trainer import packing
from rayrft.trainer.head import chunk_tokens, head_logits, head_logprobs, head_top_logprobs
from rayrft.trainer.packing import Packing, attention_by_buckets
from rayrft.trainer.policy import Policy, scored_batch
from tests.algorithms.flat import token_logprobs
from tests.errors import about
from tests.trainer.learners import adapt, move

SMALL: dict[str, Any] = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
PLAIN = [
    LlamaConfig(**SMALL),
    Qwen2Config(**SMALL),
    Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True),
    MistralConfig(**SMALL, sliding_window=6),
    Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8),
]


def make(config: PreTrainedConfig) -> Policy:
    torch.manual_seed(0)
    # Only the eager attention of transformers knows of caps.
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if capped else None)
    with torch.no_grad():  # larger than at the start of training, so that a leak between rows shows
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return Policy(model)


def rows() -> list[Tensor]:
    chance = torch.Generator().manual_seed(1)
    return [torch.randint(60, (n,), generator=chance) for n in (13, 3, 30, 1, 8)]


def by_the_model_itself(policy: Policy, temperature: float) -> Tensor:
    own = policy.model.config._attn_implementation
    policy.model.set_attn_implementation("sdpa" if own.startswith("rayrft") else own)
    found = [token_logprobs(policy.model(row[None]).logits, row[None], temperature=temperature)[0][0] for row in rows()]
    policy.model.set_attn_implementation(own)
    return torch.cat(found)


def assert_own(policy: Policy, temperature: float = 0.7) -> None:
    found = policy.output(scored_batch(rows()), temperature=temperature).logprobs
    torch.testing.assert_close(found, by_the_model_itself(policy, temperature), atol=2e-4, rtol=1e-4)


PADDED, WHOLE = "rows are padded, not packed", "the head is not chunked"
CAPPED_LOGITS = Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=5.0, attn_logit_softcapping=None)
OTHERS = {
    "capped logits": (CAPPED_LOGITS, WHOLE),
    "capped attention": (Gemma2Config(**SMALL, head_dim=8, attn_logit_softcapping=1.0), PADDED),
    "no attention": (MambaConfig(vocab_size=60, hidden_size=32, num_hidden_layers=2, state_size=8), PADDED),
    "an older model": (GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=4), None),
    "a head with a bias": (PhiConfig(**{**SMALL, "num_key_value_heads": 4}), None),
}


@pytest.mark.parametrize(("config", "pack"), [*((config, True) for config in PLAIN), (PLAIN[0], False)])
def test_packed_rows_and_a_chunked_head_give_the_models_own_log_probs(config: PreTrainedConfig, pack: bool) -> None:
    policy = make(config)
    assert policy.enable_fast_paths(pack=pack) is None and policy.packs == pack and policy.chunks_head
    assert_own(policy)


@pytest.mark.parametrize("kind", OTHERS)
def test_a_model_of_another_kind_goes_the_plain_way_and_says_so(kind: str) -> None:
    config, said = OTHERS[kind]
    policy = make(config)
    assert (said or "") in str(policy.enable_fast_paths(pack=True))
    assert_own(policy)


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SMALL, head_dim=8),
        NanoChatConfig(**SMALL),
        Lfm2Config(**SMALL, full_attn_idxs=[1]),
        OpenAIGPTConfig(vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=32),
    ],
    ids=lambda config: config.model_type,
)
def test_a_fresh_model_takes_no_path_that_fails_or_ignores_its_caps(config: PreTrainedConfig) -> None:
    policy = Policy(AutoModelForCausalLM.from_config(config))
    remark = str(policy.enable_fast_paths(pack=True))
    capped = isinstance(config, Gemma2Config | NanoChatConfig)
    assert ("the head is not chunked: the model has a final_logit_softcapping" in remark) == capped
    assert policy.chunks_head != capped and policy.packs == isinstance(config, NanoChatConfig)
    policy.output(scored_batch(rows()), temperature=1.0)


def test_a_device_fault_in_a_trial_is_no_reason_to_go_without_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")
    monkeypatch.setattr("rayrft.trainer.policy.head_logprobs", mock.Mock(side_effect=fault))
    with pytest.raises(torch.AcceleratorError):
        make(Qwen3Config(**SMALL, head_dim=8)).enable_fast_paths(pack=True)


@pytest.mark.parametrize("chunked", [True, False], ids=["chunked head", "whole head"])
def test_candidates_and_the_likeliest_tokens_are_those_of_the_model(chunked: bool) -> None:
    policy = make(PLAIN[2])
    policy.enable_fast_paths(pack=True)
    policy.chunks_head = chunked
    batch = scored_batch(rows())
    mask = batch.tokens.mask & (batch.packing.positions != 2)
    predicted = batch.predicted[mask[batch.predicted]]
    batch = replace(batch, tokens=replace(batch.tokens, mask=mask), predicted=predicted)
    logprobs, ids = policy.top_logprobs(batch, 0.7, 5, 40)
    candidates = policy.output(replace(batch, candidates=ids), temperature=0.7).candidates
    policy.model.set_attn_implementation("sdpa")
    whole = torch.cat([(policy.model(row[None]).logits[0] / 0.7).log_softmax(-1) for row in rows()])
    expected, chosen = whole[batch.predicted - 1][:, :40].topk(5)
    assert torch.equal(ids, chosen) and candidates is not None
    for found in (logprobs, candidates):
        torch.testing.assert_close(found[batch.predicted], expected, atol=2e-4, rtol=1e-4)
        assert not found[~batch.tokens.mask].any()


def alike() -> list[Tensor]:
    """Rows that begin like others: a group of three, of which two are equal, a branch, and the beginning of another."""
    rng = torch.Generator().manual_seed(2)
    prompt, *rest = (torch.randint(60, (n,), generator=rng) for n in (11, 4, 7, 3, 9))
    group = [torch.cat([prompt, answer]) for answer in (rest[0], rest[1], rest[0])]
    return [group[0], rest[3], group[1], torch.cat([group[1], rest[2]]), group[2], prompt[:6]]


def test_what_rows_share_at_the_beginning_is_computed_once() -> None:
    layout = scored_batch(alike()).packing
    assert len(layout.positions) == 15 + 9 + 18 + 21 + 15 + 6
    assert len(layout.computed) == 11 + 4 + 9 + 7 + 3


@pytest.mark.parametrize("config", PLAIN, ids=lambda config: config.model_type)
def test_rows_that_begin_alike_have_the_log_probs_and_the_gradient_of_each_alone(config: PreTrainedConfig) -> None:
    policy = make(config)
    assert policy.enable_fast_paths(pack=True) is None
    weight = torch.linspace(-1, 1, sum(map(len, alike())))
    found = policy.output(scored_batch(alike()), temperature=0.7).logprobs
    gradient = torch.autograd.grad((found * weight).sum(), list(policy.parameters()), allow_unused=True)
    alone = [policy.output(scored_batch([row]), temperature=0.7).logprobs for row in alike()]
    torch.testing.assert_close(found, torch.cat(alone), atol=2e-4, rtol=1e-4)
    expected = torch.autograd.grad((torch.cat(alone) * weight).sum(), list(policy.parameters()), allow_unused=True)
    for one, other in zip(gradient, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=1e-3)


def varlen_attn(query: Any, key: Any, value: Any, query_starts: Any, key_starts: Any, *_: int, **how: Any) -> Any:
    """The variable-length kernel (FlashAttention since 2.1) in plain torch: the last query is that of the last key."""
    left, right = how["window_size"]
    assert right == 0 and query_starts.dtype == key_starts.dtype == torch.int32
    out = []
    for row in range(len(query_starts) - 1):
        q = query[query_starts[row] : query_starts[row + 1]]
        k, v = (states[key_starts[row] : key_starts[row + 1]].repeat_interleave(2, 1) for states in (key, value))
        distance = torch.arange(len(k))[-len(q) :, None] - torch.arange(len(k))
        seen = (distance >= 0) & (distance <= left if left >= 0 else True)
        scores = torch.einsum("qhd,khd->hqk", q, k) * how["scale"]
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
    return torch.cat(out)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("of", [alike, rows], ids=["rows that begin alike", "others"])
def test_kernel_and_buckets_get_the_same_rows(of: Any, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    layout = scored_batch(of()).packing
    query, key, value = (torch.randn(len(layout.computed), heads, 8) for heads in (4, 2, 2))
    found = packing.attention_by_kernel(query, key, value, layout, 0.3, window)
    torch.testing.assert_close(
        found, attention_by_buckets(query, key, value, layout, 0.3, window), atol=1e-5, rtol=1e-4
    )


FA3 = """
import torch
library = torch.library.Library("flash_attn_3", "FRAGMENT")
for name in ("fwd", "bwd"):
    library.define(f"{name}() -> ()")
"""


@pytest.mark.parametrize(
    ("capability", "module", "found"),
    [((9, 0), "x = 1", "has no kernels"), ((8, 0), FA3, None), ((9, 0), None, None), ((9, 0), FA3, "FA3")],
    ids=["a package without kernels", "an A100", "no package", "an H100"],
)
def test_on_hopper_attention_is_that_of_flash_attention_3_if_it_is_installed(
    capability: tuple[int, int], module: str | None, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    if module is not None:
        (tmp_path / "flash_attn_interface.py").write_text(module)
    importlib.invalidate_caches()
    try:
        if found == "has no kernels":
            with pytest.raises(ModelError, match="has no kernels for this torch"):
                packing.register()
        else:
            packing.register()
            assert torch.nn.attention.current_flash_attention_impl() == found
    finally:
        torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)


@pytest.mark.parametrize(
    ("vocabulary", "gb", "tokens"), [(151_936, 80, 1024), (128_256, 80, 1280), (151_936, 24, 256), (1_000, 80, 8192)]
)
def test_the_logits_of_a_chunk_take_a_fortieth_of_a_gpu(vocabulary: int, gb: int, tokens: int) -> None:
    assert chunk_tokens(vocabulary, gb * 1e9) == tokens
    assert 3 * 4 * tokens * vocabulary <= gb * 1e9 / 40


def test_a_model_that_names_no_layers_is_not_compiled() -> None:
    policy = make(PLAIN[2])
    policy.model._no_split_modules = None
    with pytest.raises(ModelError, check=about("trainer.compile", "Qwen3ForCausalLM")):
        policy.compile_layers()


def test_logits_exist_for_as_many_tokens_as_the_policy_is_set_to() -> None:
    policy, batch = make(PLAIN[2]), scored_batch(rows())
    policy.enable_fast_paths(pack=True)
    policy.head_chunk = 3
    with mock.patch("rayrft.trainer.head.head_logits", wraps=head_logits) as made:
        policy.output(batch, temperature=1.0)
        policy.top_logprobs(batch, 1.0, 2, 40)
    assert {len(call.args[0]) for call in made.call_args_list[:-1]} <= {3, len(batch.predicted) % 3}


def leaking(query: Any, key: Any, value: Any, packed: Packing, scaling: Any, window: Any) -> Tensor:
    whole = Packing.of([np.arange(len(query))])
    return attention_by_buckets(query, key, value, whole, scaling, window)


REFUSING = mock.Mock(side_effect=RuntimeError("head size 20 is not taken\nnor is 21"))


class OneWay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor) -> Tensor:
        return states.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("no way back")


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (attention_by_buckets, None),
        (leaking, "with the attention kernel log-probs would differ by"),
        (REFUSING, "the attention kernel fails: head size 20 is not taken"),
        (lambda *given: OneWay.apply(attention_by_buckets(*given)), "the attention kernel fails: no way back"),
    ],
    ids=["right", "leaking", "refusing", "without a gradient"],
)
def test_a_half_precision_kernel_is_tried_first(kernel: Any, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "uses_kernel", lambda device, dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(packing, "attention_by_kernel", kernel)
    policy = make(PLAIN[2])
    before = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    remark = policy.enable_fast_paths(pack=True, compute=torch.bfloat16)
    assert policy.packs == (said is None)
    assert remark is None if said is None else str(remark).startswith(f"{PADDED}: {said}") and "\n" not in str(remark)
    assert all(torch.equal(before[name], each) and each.grad is None for name, each in policy.named_parameters())
    assert_own(policy)


@pytest.mark.parametrize("adapter", [False, True])
def test_gradient_checkpointing_keeps_less_and_changes_no_gradient(adapter: bool) -> None:
    gradients, kept = [], []
    for checkpointing in (False, True):
        policy = make(PLAIN[2])
        if adapter:
            move(adapt(policy, torch.float32), 0.3)
        policy.enable_fast_paths(pack=True)
        if checkpointing:
            policy.checkpoint_layers()
        saved: list[int] = []
        with saved_tensors_hooks(lambda t, into=saved: (into.append(t.numel()), t)[1], lambda t: t):
            loss = policy.output(scored_batch(rows()), temperature=1.0).logprobs.sum()
        loss.backward()
        kept.append(sum(saved))
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    torch.testing.assert_close(*gradients)
    assert kept[1] < kept[0] / 2


def test_a_model_that_cannot_checkpoint_its_layers_says_so() -> None:
    model = torch.nn.Module()
    model.supports_gradient_checkpointing = True
    with pytest.raises(ModelError, check=about("trainer.gradient_checkpointing", "Module")):
        Policy(model).checkpoint_layers()


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    logp = (hidden @ weight.T / temperature[:, None]).log_softmax(-1)
    columns = targets if targets.dim() == 2 else targets[:, None]
    return logp.gather(-1, columns).view_as(targets), -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("shape", [(7,), (7, 4)], ids=["one token in a place", "several"])
@pytest.mark.parametrize("entropic", [True, False])
def test_values_and_gradients_are_those_of_the_plain_head(chunk: int, shape: tuple[int, ...], entropic: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    temperature, targets = torch.rand(7, dtype=torch.float64) + 0.5, torch.randint(11, shape)
    targets.view(7, -1)[:, -1] = targets.view(7, -1)[:, 0]  # the sampled token may be among the candidates
    mix, results = torch.randn(shape, dtype=torch.float64), []
    for function in (plain, functools.partial(head_logprobs, chunk=chunk)):
        logprobs, entropy = function(hidden, weight, targets, temperature)
        loss = (logprobs * mix).sum() + (entropy.square().sum() if entropic else 0.0)
        results.append((logprobs, entropy, *torch.autograd.grad(loss, (hidden, weight))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("chunk", [2, 100])
def test_the_likeliest_tokens_are_those_of_the_plain_head_that_may_be_had(chunk: int) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 3, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    temperature = torch.rand(5, dtype=torch.float64) + 0.5
    whole = (hidden @ weight.T / temperature[:, None]).log_softmax(-1)
    logprobs, ids = head_top_logprobs(hidden, weight, temperature, 4, 9, chunk=chunk)
    torch.testing.assert_close(logprobs, whole[:, :9].sort(descending=True).values[:, :4])
    torch.testing.assert_close(whole.gather(-1, ids), logprobs)
    assert whole[:, 9:].max() > logprobs.min() and ids.max() < 9


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("chunk", [2, None])
def test_gradients_are_right_in_every_precision(dtype: torch.dtype, tolerance: float, chunk: int | None) -> None:
    torch.manual_seed(0)
    exact = [torch.randn(5, 4), torch.randn(9, 4)]
    temperature, targets, mix = torch.tensor([1.0, 0.7, 1.3, 1.0, 0.5]), torch.randint(9, (5,)), torch.randn(5)
    hidden, weight = (each.to(dtype).requires_grad_() for each in exact)
    logprobs, _ = head_logprobs(hidden, weight, targets, temperature, chunk=chunk)
    found = torch.autograd.grad((logprobs * mix).sum(), (hidden, weight))
    hidden, weight = (each.detach().double().requires_grad_() for each in (hidden, weight))
    loss = (plain(hidden, weight, targets, temperature)[0] * mix).sum()
    for ours, theirs in zip(found, torch.autograd.grad(loss, (hidden, weight)), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor):
                self.numel = max(self.numel, each.numel())
        return made


@pytest.mark.parametrize("entropic", [True, False])
def test_neither_pass_ever_holds_tokens_times_vocabulary(entropic: bool) -> None:
    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)

    def backward(logprobs: Tensor, entropy: Tensor) -> None:
        (logprobs.sum() + (entropy.sum() if entropic else 0.0)).backward()

    with Largest() as chunked:
        backward(*head_logprobs(hidden, weight, torch.zeros(64, dtype=torch.int64), torch.ones(64), chunk=8))
    assert chunked.numel == 8 * 1000, "logits of a chunk"
    with Largest() as whole:
        backward(*plain(hidden, weight, torch.zeros(64, dtype=torch.int64), torch.ones(64)))
    assert whole.numel == 64 * 1000


def test_a_frozen_head_gets_no_gradient_and_costs_none() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(6, 4)
    logprobs, _ = head_logprobs(hidden, weight, torch.tensor([0, 1, 2]), torch.ones(3))
    logprobs.sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_a_logit_of_minus_infinity_counts_0_in_the_entropy_and_has_no_gradient() -> None:
    # Logits 1, 2 and, beyond the range of the format, -inf.
    hidden = torch.tensor([[1e30, 1.0]], requires_grad=True)
    weight = torch.tensor([[0.0, 1.0], [0.0, 2.0], [-1e30, 0.0]])
    logprobs, entropy = head_logprobs(hidden, weight, torch.tensor([1]), torch.ones(1))
    alone = torch.tensor([[1.0]], requires_grad=True)
    expected = head_logprobs(alone, weight[:2, 1:], torch.tensor([1]), torch.ones(1))
    assert (logprobs.item(), entropy.item()) == pytest.approx((expected[0].item(), expected[1].item()))
    [found] = torch.autograd.grad((logprobs + 3 * entropy).sum(), hidden)
    [slope] = torch.autograd.grad((expected[0] + 3 * expected[1]).sum(), alone)
    assert found.tolist() == [[0.0, pytest.approx(slope.item())]]


def test_on_a_gpu_logits_of_half_precision_are_not_rounded() -> None:
    with FakeTensorMode(), torch.no_grad():
        hidden, weight = (torch.empty(size, 4, dtype=torch.bfloat16, device="cuda") for size in (8, 16))
        assert head_logits(hidden, weight, None, torch.float32).dtype == torch.float32


def test_hidden_states_that_are_no_numbers_are_not_passed_over() -> None:
    hidden = torch.tensor([[float("nan"), 1.0]])
    assert head_logprobs(hidden, torch.ones(3, 2), torch.tensor([1]), torch.ones(1))[0].isnan().all()


@pytest.mark.parametrize("pack", [False, True], ids=["padded", "packed"])
def test_the_loss_that_balances_experts_is_that_of_transformers(pack: bool) -> None:
    policy, own = make(copy.deepcopy(PLAIN[-1])), make(copy.deepcopy(PLAIN[-1]))
    assert policy.enable_fast_paths(pack=pack) is None and policy.packs == pack
    sequences = [torch.arange(first, first + length) for first, length in ((0, 9), (20, 4), (40, 13))]
    batch = scored_batch(sequences)
    assert policy.output(batch, temperature=1.0).balance is None, "it has no weight"
    policy.balance_experts(0.1)
    found = policy.output(batch, temperature=1.0).balance
    padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(each)) for each in sequences], batch_first=True)
    expected = own.model(padded, attention_mask=mask, output_router_logits=True).aux_loss
    torch.testing.assert_close(found, expected)


def test_a_model_without_experts_has_no_load_to_balance() -> None:
    with pytest.raises(ModelError, check=about("trainer.router_loss", "LlamaForCausalLM")):
        make(PLAIN[0]).balance_experts(0.1)
