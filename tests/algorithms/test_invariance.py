"""Losses and gradients of every registered piece depend neither on the split of a step, nor on values off the mask, nor
on the size of log-probs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rayrft.algorithms import Algorithm, Denominators, build, count, policy_losses, presets
from rayrft.algorithms.batch import PER_TOKEN
from rayrft.algorithms.registries import REGISTRIES
from rayrft.algorithms.values import gae, token_advantages, value_losses
from tests.algorithms.rows import Row, collate, make_rows, step


def cases() -> Iterator[Any]:
    """Every preset, and every piece of every registry in an algorithm that uses it."""
    for name in presets:
        yield pytest.param(build(name), id=f"preset {name}")
    base = {
        "aggregation": ("grpo", {"kl": "k3", "entropy": "bonus"}),
        "sft_aggregation": ("mix", {}),
        "sft": ("mix", {}),
        "mu_schedule": ("mix", {}),
        "preference": ("dpo", {}),
        "unpaired": ("kto", {"undesirable_weight": 1.5}),
        "reward_model": ("reward_model", {"center": 0.1}),
        "distillation": ("distill", {}),
        "value_loss": ("ppo", {}),
    }
    for kind, registries in REGISTRIES.items():
        name, pieces = base.get(kind, ("grpo", {}))
        for registry in registries:
            for piece in registry:
                needs = {"value_loss": "squared"} if registry is token_advantages else {}
                if "no_gradient" in registry.get(piece).traits:
                    needs = {"kl_in": "reward"}
                yield pytest.param(build(name, {**pieces, **needs, kind: piece}), id=f"{kind} {piece}")
    yield pytest.param(build("grpo", {"policy_loss": "ppo", "dual_clip": 1.1}), id="dual clip")
    yield pytest.param(build("gspo", {"correction": ["truncated", "sequence_mask", "off_policy_mask"]}), id="several")
    yield pytest.param(build("grpo", {"kl": "k3_unbiased", "kl_ratio_cap": 2.0}), id="capped ratio of the KL")
    yield pytest.param(build("dpo", {"chosen_coef": 0.5}), id="likelihood of the chosen")
    for over in ("token", "sum", "max"):
        pieces = {"correction": "divergence_mask", "divergence_of": over, "divergence_cap": 0.1}
        yield pytest.param(build("grpo", pieces), id=f"divergence of {over}")
    for keep_where in ("all", "two_side", "ring"):
        yield pytest.param(build("rec", {"keep_where": keep_where, "weigh_by_ratio": True}), id=f"rec {keep_where}")


# A preset may be no more than `grpo` with another piece.
ALL = list({repr(dataclasses.replace(case.values[0], name="")): case for case in cases()}.values())


WHOLE = [list(range(12))]
SPLIT = [[11, 3, 10], [7, 0], [9, 8], [4], [1], [2], [6, 5]]
"""Rows alone, one of them without action tokens, and of different kinds together, in another order."""


def pad(row: Row) -> Row:
    """The row with padding, which is no more than tokens off the mask, wherever it stands."""
    fields, output = (
        {name: torch.cat([values, values[:3] * torch.nan]) for name, values in each.items()}
        for each in (row.fields, row.output)
    )
    mask = torch.cat([row.mask, torch.zeros(3, dtype=torch.bool)])
    return dataclasses.replace(row, mask=mask, fields=fields, output=output)


@pytest.mark.parametrize("algorithm", ALL)
def test_neither_split_and_order_nor_what_is_off_the_mask_changes_anything(algorithm: Algorithm) -> None:
    rows = make_rows()
    loss, parts, grad = step(algorithm, rows, WHOLE)
    assert loss != 0.0 and grad.abs().sum() > 0
    off = torch.cat([(~row.mask)[:, None].expand(-1, width).flatten() for row in rows for width in (1, 1, 4)])
    assert (grad[off] == 0).all()
    again, parts_again, grad_again = step(algorithm, rows, SPLIT)
    assert again == pytest.approx(loss, abs=1e-9)
    torch.testing.assert_close((parts_again, grad_again), (parts, grad), atol=1e-9, rtol=0)
    for garbage in (torch.inf, -torch.inf, -1e30):
        again, parts_again, grad_again = step(algorithm, make_rows(garbage), WHOLE)
        assert again == loss and torch.equal(parts_again, parts) and torch.equal(grad_again, grad)
    padded, parts_padded, _ = step(algorithm, [pad(row) for row in rows], WHOLE)
    assert padded == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(parts_padded, parts, atol=1e-12, rtol=0)


@pytest.mark.parametrize("algorithm", ALL)
@pytest.mark.parametrize("kind", ["unlikely now", "unlikely then", "unlikely always"])
def test_no_logprob_is_too_small(algorithm: Algorithm, kind: str) -> None:
    rows = make_rows(dtype=torch.float32)
    for row in rows:
        if kind != "unlikely then":
            row.output["logprobs"].mul_(1e4)
            row.output["candidates"].mul_(1e4)
        if kind != "unlikely now":
            for name in PER_TOKEN:
                if name.endswith(("logprobs", "candidates")):
                    row.fields[name].mul_(1e4)
    _, parts, grad = step(algorithm, rows, WHOLE)
    assert torch.isfinite(parts).all() and torch.isfinite(grad).all()


def just_sampled() -> list[Row]:
    """Rows of which the policy that sampled them has not moved since."""
    rows = make_rows()
    for row in rows:
        for name in ("behaviour_logprobs", "proximal_logprobs"):
            row.fields[name].copy_(row.output["logprobs"])
    return rows


@pytest.mark.parametrize("algorithm", [case for case in ALL if "rollouts" in case.values[0].needs])
def test_at_the_policy_that_sampled_ratio_is_1_and_nothing_is_clipped(algorithm: Algorithm) -> None:
    rows = just_sampled()
    batch, output = collate(rows, WHOLE[0], [row.output for row in rows])
    over = Denominators(*count([batch]).tolist())
    parts = algorithm.loss(output, batch, over, step=20)
    assert parts.ratio.item() == pytest.approx(over.policy_tokens)
    assert (parts.clipped.item(), parts.logprob_gap.item()) == (0.0, 0.0)


ON_POLICY = sorted(set(policy_losses) - {"opmd", "raft", "red_weight"})


@pytest.mark.parametrize("name", ON_POLICY)
def test_at_the_policy_that_sampled_every_policy_loss_has_the_gradient_of_reinforce(name: str) -> None:
    """Those that do not are meant to differ there: opmd is scaled, raft and red_weight weigh by the advantage."""
    rows = just_sampled()
    found, expected = (
        step(build("grpo", {"policy_loss": each, "aggregation": "sequence_mean_token_mean"}), rows, WHOLE)[2]
        for each in (name, "reinforce")
    )
    if name in ("kimi", "importance_sequence"):  # the gradient of the sum over the answer, not of its mean
        sizes = [(len(row.mask) * width, float(row.mask.sum())) for row in rows for width in (1, 1, 4)]
        expected = expected * torch.cat([torch.full((size,), length) for size, length in sizes])
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)


GAE = {"gamma": 0.9, "lam": 0.8, "bootstrap_truncated": True, "reward_high": 0.9}


@pytest.mark.parametrize(("name", "pieces"), [("ppo", GAE), ("grpo", {}), ("reinforce_pp", {})])
def test_advantages_that_the_trainer_computes_do_not_depend_on_the_split(name: str, pieces: dict[str, Any]) -> None:
    rows = make_rows()
    algorithm = build(name, {"kl": "k1", "kl_in": "reward", "kl_coef": 0.3, **pieces})
    leaves = [row.output for row in rows]

    def by_row(split: list[list[int]]) -> dict[int, Tensor]:
        found = {}
        for numbers in split:
            batch = algorithm.token_advantages(collate(rows, numbers, leaves)[0])
            for place, number in enumerate(numbers):
                mine = (batch.sequence == place) & batch.usual().mask
                assert batch.returns is not None  # without a critic, those that were there
                found[number] = torch.stack([batch.advantages[mine], batch.returns[mine]])
        return found

    whole, again = by_row(WHOLE), by_row(SPLIT)
    assert all(torch.equal(again[number], whole[number]) for number in range(12))
    assert list(token_advantages) == ["gae"] and token_advantages.get("gae").function is gae


@pytest.mark.parametrize("name", value_losses)
def test_the_critics_loss_does_not_depend_on_the_split(name: str) -> None:
    rows, algorithm = make_rows(), build("ppo", {"value_loss": name})
    leaves = [row.output for row in rows]

    def loss(split: list[list[int]]) -> float:
        batches = [collate(rows, numbers, leaves) for numbers in split]
        over = Denominators(*count([batch for batch, _ in batches]).tolist())
        return sum(algorithm.value_loss_of(output.logprobs, batch, over).item() for batch, output in batches)

    whole = loss(WHOLE)
    assert whole > 0 and loss(SPLIT) == pytest.approx(whole, abs=1e-9)
