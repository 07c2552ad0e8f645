"""A step of own, expert and paired rows that can be split into micro-batches in any way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rayrft.algorithms import Algorithm, Denominators, PolicyOutput, TokenBatch, count, rows_by_pair
from rayrft.algorithms.batch import PER_TOKEN

OUTPUT = ("logprobs", "entropy", "candidates")
CANDIDATES = 4


@dataclass(frozen=True)
class Row:
    """One row of T tokens: its fields, ``[T]``, and the policy's output for them."""

    mask: Tensor
    fields: dict[str, Tensor]
    output: dict[str, Tensor]
    expert: bool
    pair: int
    chosen: bool
    weight: float


def make_rows(garbage: float = torch.nan, scale: float = 0.5, dtype: torch.dtype = torch.float64) -> list[Row]:
    """Own, expert and paired rows of several lengths, with ``garbage`` off the mask, also in the policy's output. One
    own row has no action token; one has an observation in the middle."""
    torch.manual_seed(0)
    kinds = ["own"] * 5 + ["expert"] * 3 + ["pair"] * 4
    rows = []
    for number, kind in enumerate(kinds):
        length = int(torch.randint(3, 9, ()))
        mask = torch.arange(length) >= 2
        mask[4:5] &= number != 1
        mask &= number != 2

        def noise(mean: float = 0.0, length: int = length) -> Tensor:
            return torch.randn(length, dtype=dtype) * scale + mean

        base = -noise().abs() - 0.5
        # In the first row the policies are close, so that not even the narrowest clip binds.
        near = 1e-4 if number == 0 else 1.0
        fields = {name: -(base + noise() * near).abs() for name in PER_TOKEN if name.endswith("logprobs")}
        fields |= {name: noise() for name in ("turn_rewards", "values", "returns")}
        fields["advantages"] = torch.full((length,), float(torch.randn(())), dtype=dtype)
        fields["teacher_candidates"] = (torch.randn(length, CANDIDATES + 1, dtype=dtype) * scale).log_softmax(-1)[:, 1:]
        candidates = (torch.randn(length, CANDIDATES + 1, dtype=dtype) * scale).log_softmax(-1)[:, 1:]
        output = {"logprobs": base, "entropy": noise().abs(), "candidates": candidates}
        for values in (*fields.values(), *output.values()):
            values[~mask] = garbage
        pair = (number - 8) // 2 if kind == "pair" else -1
        rows.append(Row(mask, fields, output, kind == "expert", pair, number % 2 == 0, 1.0 + number % 3))
    return rows


def collate(rows: list[Row], numbers: list[int], leaves: list[dict[str, Tensor]]) -> tuple[TokenBatch, PolicyOutput]:
    """These rows as one micro-batch; pairs are numbered anew."""
    picked = [rows[number] for number in numbers]
    batch = TokenBatch(
        mask=torch.cat([row.mask for row in picked]),
        sequence=torch.cat([torch.full((len(row.mask),), place) for place, row in enumerate(picked)]),
        expert=torch.tensor([row.expert for row in picked]),
        weight=torch.tensor([row.weight for row in picked]),
        reward=torch.tensor([float(row.chosen) for row in picked], dtype=picked[0].fields["values"].dtype),
        truncated=torch.tensor([row.weight == 3.0 for row in picked]),
        final_values=torch.tensor([row.weight - 1.0 for row in picked], dtype=picked[0].fields["values"].dtype),
        pairs=rows_by_pair([None if row.pair < 0 else row.pair for row in picked], [row.chosen for row in picked]),
        chosen=torch.tensor([row.chosen for row in picked]),
        reference_kl=torch.full((len(picked),), 0.3, dtype=picked[0].fields["values"].dtype),
        margin=torch.tensor([0.1 * row.pair for row in picked], dtype=picked[0].fields["values"].dtype),
        **{name: torch.cat([row.fields[name] for row in picked]) for name in PER_TOKEN},
    )
    return batch, PolicyOutput(*(torch.cat([leaves[number][name] for number in numbers]) for name in OUTPUT))


def step(algorithm: Algorithm, rows: list[Row], split: list[list[int]]) -> tuple[float, Tensor, Tensor]:
    """Loss, all its parts, and the gradient on every token of every row, of a step split so."""
    leaves = [{name: values.clone().requires_grad_() for name, values in row.output.items()} for row in rows]
    batches = [collate(rows, numbers, leaves) for numbers in split]
    over = Denominators(*count([batch for batch, _ in batches]).tolist())
    parts = []
    for batch, output in batches:
        if algorithm.trains_reward_model:
            share = algorithm.score_loss(batch.mean(output.logprobs), batch, over)
        else:
            share = algorithm.loss(output, batch, over, step=20)
        share.loss.backward()
        parts.append(share.stack())
    gradients = [
        (values.grad if values.grad is not None else torch.zeros_like(values)).flatten()
        for leaf in leaves
        for values in leaf.values()
    ]
    total = torch.stack(parts).sum(0)
    return total[0].item(), total, torch.cat(gradients)
