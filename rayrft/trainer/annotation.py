"""Model outputs computed before a batch's first update, added to its micro-batches. Every call is a collective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import torch

from rayrft.algorithms import Algorithm, row_value_errors
from rayrft.algorithms.batch import keep
from rayrft.trainer.batches import MicroBatch
from rayrft.trainer.blame import blaming
from rayrft.trainer.loading import reshard
from rayrft.trainer.policy import Policy
from rayrft.trainer.value_model import Critic

Batches = list[list[MicroBatch]]
"""The micro-batches of each mini-batch."""


def each_micro(batches: Batches, change: Callable[[MicroBatch], MicroBatch]) -> Batches:
    """Return the batches with every micro-batch changed."""
    return [[change(micro) for micro in batch] for batch in batches]


@torch.no_grad()
def with_logprobs(batches: Batches, name: str, policy: Policy, temperature: float) -> Batches:
    """Return the batches with the current log-probs of ``policy`` in the field ``name``."""
    annotated = each_micro(
        batches, lambda micro: micro.annotated(**{name: policy.output(micro, temperature=temperature).logprobs})
    )
    reshard(policy)
    return annotated


@torch.no_grad()
def with_values(batches: Batches, critic: Critic, *, final: bool = False) -> Batches:
    """Return the batches with the critic's values; with ``final``, also for the states at which answers were cut."""

    def annotate(micro: MicroBatch) -> MicroBatch:
        with blaming(micro):
            values, ends = critic(micro, final=final)
        truncated = micro.tokens.truncated
        cut = {} if not final or truncated is None else {"final_values": keep(ends, truncated)}
        return micro.annotated(values=values, **cut)

    annotated = each_micro(batches, annotate)
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
            return replace(micro.annotated(teacher_candidates=logprobs), candidates=ids)

        batches = each_micro(batches, with_candidates)
        reshard(teacher)
    return batches


def value_errors(batches: Batches) -> dict[str, list[float]]:
    """Return the critic's errors on this rank's rows of each group, by group id."""
    micros = list(chain.from_iterable(batches))
    groups = chain.from_iterable(zip(micro.groups, micro.sampled, strict=True) for micro in micros)
    errors = torch.cat([row_value_errors(micro.tokens) for micro in micros]).tolist()
    rows: dict[str, list[float]] = {}
    for (group, counts), error in zip(groups, errors, strict=True):
        if group and counts:
            rows.setdefault(group, []).append(error)
    return rows
