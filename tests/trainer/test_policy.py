"""The policy gives the log-probs of the model that it wraps, or says why it does not take its shorter ways."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
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
from rayrft.trainer.packing import Packing
from rayrft.trainer.policy import Policy, scored_batch
from tests.algorithms.flat import token_logprobs
from tests.errors import about

SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
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


def rows() -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(1)
    return [torch.randint(60, (n,), generator=chance) for n in (13, 3, 30, 1, 8)]


def by_the_model_itself(policy: Policy, temperature: float) -> torch.Tensor:
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
    def fails(*_: Any, **__: Any) -> None:
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")

    monkeypatch.setattr("rayrft.trainer.policy.head_logprobs", fails)
    with pytest.raises(torch.AcceleratorError):
        make(Qwen3Config(**SMALL, head_dim=8)).enable_fast_paths(pack=True)


@pytest.mark.parametrize("chunked", [True, False], ids=["chunked head", "whole head"])
def test_candidates_and_the_likeliest_tokens_are_those_of_the_model(chunked: bool) -> None:
    policy = make(PLAIN[2])
    policy.enable_fast_paths(pack=True)
    policy.chunks_head = chunked
    batch = scored_batch(rows())
    batch = replace(batch, tokens=replace(batch.tokens, mask=batch.tokens.mask & (batch.packing.positions != 2)))
    logprobs, ids = policy.top_logprobs(batch, 0.7, 5, 40)
    candidates = policy.output(replace(batch, candidates=ids), temperature=0.7).candidates
    policy.model.set_attn_implementation("sdpa")
    whole = torch.cat([(policy.model(row[None]).logits[0] / 0.7).log_softmax(-1) for row in rows()])
    expected, chosen = whole[batch.predicted - 1][:, :40].topk(5)
    assert torch.equal(ids, chosen) and candidates is not None
    for found in (logprobs, candidates):
        torch.testing.assert_close(found[batch.predicted], expected, atol=2e-4, rtol=1e-4)
        assert not found[~batch.tokens.mask].any()


def alike() -> list[torch.Tensor]:
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
def test_the_kernel_is_given_the_rows_as_the_buckets_have_them(
    of: Any, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    layout = scored_batch(of()).packing
    query, key, value = (torch.randn(len(layout.computed), heads, 8) for heads in (4, 2, 2))
    found = packing._kernel(query, key, value, layout, 0.3, window)
    torch.testing.assert_close(found, by_buckets(query, key, value, layout, 0.3, window), atol=1e-5, rtol=1e-4)


def by_buckets(query: Any, key: Any, value: Any, packed: Packing, scaling: Any, window: Any) -> torch.Tensor:
    """What the kernel of a GPU gives, in plain torch."""
    parts = [packing._bucket(query, key, value, each, scaling, window) for each in packed.buckets]
    return torch.cat(parts)[packed.index]


def leaking(query: Any, key: Any, value: Any, packed: Packing, scaling: Any, window: Any) -> torch.Tensor:
    whole = Packing.of([np.arange(len(query))], query.device)
    return by_buckets(query, key, value, whole, scaling, window)


def refusing(*_: Any) -> torch.Tensor:
    raise RuntimeError("head size 20 is not taken\nnor is 21")


class OneWay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: torch.Tensor) -> torch.Tensor:
        return states.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no way back")


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (by_buckets, None),
        (leaking, "with the attention kernel log-probs would differ by"),
        (refusing, "the attention kernel fails: head size 20 is not taken"),
        (lambda *given: OneWay.apply(by_buckets(*given)), "the attention kernel fails: no way back"),
    ],
    ids=["right", "leaking", "refusing", "without a gradient"],
)
def test_a_kernel_for_half_precision_is_tried_before_it_is_used(
    kernel: Any, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "uses_kernel", lambda device, dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(packing, "_kernel", kernel)
    policy = make(PLAIN[2])
    before = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    remark = policy.enable_fast_paths(pack=True, compute=torch.bfloat16)
    assert policy.packs == (said is None)
    assert remark is None if said is None else str(remark).startswith(f"{PADDED}: {said}") and "\n" not in str(remark)
    assert all(torch.equal(before[name], each) and each.grad is None for name, each in policy.named_parameters())
    assert_own(policy)


def test_gradient_checkpointing_keeps_less_and_changes_no_gradient() -> None:
    gradients, kept = [], []
    for checkpointing in (False, True):
        policy = make(PLAIN[2])
        policy.enable_fast_paths(pack=True)
        if checkpointing:
            policy.checkpoint_layers()
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, into=saved: (into.append(t.numel()), t)[1], lambda t: t
        ):
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
