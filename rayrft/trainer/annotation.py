"""Model outputs computed before a batch's first update, added to its micro-batches. Every call is a collective."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from rayrft.algorithms import Algorithm, row_value_errors
from rayrft.algorithms.batch import keep
from rayrft.trainer.batches import MicroBatch
from rayrft.trainer.model import reshard
from rayrft.trainer.policy import Policy
from rayrft.trainer.value_model import Critic

Batches = list[list[MicroBatch]]
"""The micro-batches of each mini-batch."""


@torch.no_grad()
def with_logprobs(batches: Batches, name: str, policy: Policy, temperature: float) -> Batches:
    """Return the batches with the current log-probs of ``policy`` in the field ``name``."""
    annotated = [
        [_with(micro, **{name: policy.output(micro, temperature=temperature).logprobs}) for micro in batch]
        for batch in batches
    ]
    reshard(policy)
    return annotated


def with_values(batches: Batches, critic: Critic, *, final: bool = False) -> Batches:
    """Return the batches with the critic's values; with ``final``, also those of the states in which truncated answers
    were cut."""

    def annotate(micro: MicroBatch) -> MicroBatch:
        values, ends = critic.values(micro, final=final)
        if not final or micro.tokens.truncated is None:
            return _with(micro, values=values)
        return _with(micro, values=values, final_values=keep(ends, micro.tokens.truncated))

    annotated = [[annotate(micro) for micro in batch] for batch in batches]
    reshard(critic)
    return annotated


def with_teacher(
    batches: Batches, algorithm: Algorithm, teacher: Policy, vocabulary: int, temperature: float
) -> Batches:
    """Return the batches with the teacher's log-probs of the sampled tokens, or its top-k tokens with their log-probs.

    ``vocabulary`` is the policy's size: engines sample only its tokens, none that only the teacher knows.
    """
    if "teacher_logprobs" in algorithm.needs:
        batches = with_logprobs(batches, "teacher_logprobs", teacher, temperature)
    if "teacher_candidates" in algorithm.needs:
        shared = min(teacher.vocabulary, vocabulary)
        k = min(algorithm.teacher_candidates, shared)

        def with_candidates(micro: MicroBatch) -> MicroBatch:
            logprobs, ids = teacher.top_logprobs(micro, temperature, k, shared)
            return replace(_with(micro, teacher_candidates=logprobs), candidates=ids)

        batches = [[with_candidates(micro) for micro in batch] for batch in batches]
        reshard(teacher)
    return batches


def value_errors(batches: Batches) -> dict[str, tuple[float, int]]:
    """Return the critic's errors by group id: their sum over this rank's rows of the group, and the number of rows."""
    rows: dict[str, list[float]] = {}
    for micro in chain.from_iterable(batches):
        own = (~micro.tokens.expert & ~micro.tokens.paired).tolist()
        for group, error, counts in zip(micro.groups, row_value_errors(micro.tokens).tolist(), own, strict=True):
            if counts:
                rows.setdefault(group, []).append(error)
    return {group: (sum(errors), len(errors)) for group, errors in rows.items() if group}


def _with(micro: MicroBatch, **fields: Tensor) -> MicroBatch:
    return replace(micro, tokens=replace(micro.tokens, **fields))
