"""What models say of a batch before its first update, written onto its micro-batches. Every call is a collective."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from rayrft.algorithms import Algorithm, errors_of_values
from rayrft.trainer.batches import MicroBatch
from rayrft.trainer.model import reshard
from rayrft.trainer.policy import Policy
from rayrft.trainer.value_model import Critic

Batches = list[list[MicroBatch]]
"""The micro-batches of each mini-batch."""


@torch.no_grad()
def with_logprobs(batches: Batches, name: str, policy: Policy, temperature: float) -> Batches:
    """The batches with the log-probs of that policy, as it is now, under that name."""
    found = [
        [_with(micro, **{name: policy.output(micro, temperature=temperature).logprobs}) for micro in each]
        for each in batches
    ]
    reshard(policy)
    return found


def with_values(batches: Batches, critic: Critic) -> Batches:
    """The batches with the critic's values."""
    found = [[_with(micro, values=critic.values(micro)) for micro in each] for each in batches]
    reshard(critic)
    return found


def with_teacher(
    batches: Batches, algorithm: Algorithm, teacher: Policy, vocabulary: int, temperature: float
) -> Batches:
    """The batches with what the teacher says of the sampled tokens, or of those that it finds likeliest itself.

    ``vocabulary`` is the policy's: the engines may sample any token of that, and none that only the teacher knows.
    """
    if algorithm.needs_teacher_logprobs:
        batches = with_logprobs(batches, "teacher_logprobs", teacher, temperature)
    if algorithm.needs_candidates:
        among = min(teacher.vocabulary, vocabulary)
        count = min(algorithm.teacher_candidates, among)

        def ask(micro: MicroBatch) -> MicroBatch:
            logprobs, ids = teacher.likeliest(micro, temperature, count, among)
            return replace(_with(micro, teacher_candidates=logprobs), candidates=ids)

        batches = [[ask(micro) for micro in each] for each in batches]
        reshard(teacher)
    return batches


def value_errors(batches: Batches) -> dict[str, float]:
    """By how much the critic missed each group of own rows on this rank: the mean over rows, by the group's id."""
    rows: dict[str, list[float]] = {}
    for micro in chain.from_iterable(batches):
        own = (~micro.tokens.expert & ~micro.tokens.paired).tolist()
        for group, error, counts in zip(micro.groups, errors_of_values(micro.tokens).tolist(), own, strict=True):
            if counts:
                rows.setdefault(group, []).append(error)
    return {group: sum(errors) / len(errors) for group, errors in rows.items() if group}


def _with(micro: MicroBatch, **fields: Tensor) -> MicroBatch:
    return replace(micro, tokens=replace(micro.tokens, **fields))
