"""Learning from a teacher on the policy's own samples (on-policy distillation: Agarwal et al. 2023, arXiv:2306.13649).

A loss takes the policy's output and the usual rows of a batch, zero off the mask, and returns a loss per token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rayrft.algorithms.batch import PolicyOutput, TokenBatch
from rayrft.algorithms.pieces import OpenFraction, Pieces, Positive, require
from rayrft.algorithms.ratios import log_ratio

DistillationLoss = Callable[[PolicyOutput, TokenBatch], Tensor]

distillations: Pieces[DistillationLoss] = Pieces("distillation")


@distillations.register("reverse_kl", needs=["teacher", "teacher_logprobs"])
def reverse_kl(output: PolicyOutput, batch: TokenBatch, *, ratio_cap: Positive = 2.0) -> Tensor:
    """``KL(pi || teacher)`` at every state, from the teacher's log-prob of the sampled token alone (Gu et al. 2023,
    arXiv:2306.08543; as a per-token advantage: Lu 2025, "On-policy distillation").

    ``w_t d_t`` with ``d_t = log pi(y_t) - log teacher(y_t)``, clamped to +-20, and ``w_t = min(rho_t, ratio_cap)``,
    where rho_t is the ratio to the behaviour policy. This is truncated importance sampling, as in the correction
    `truncated`. Its gradient ``w_t d_t grad log pi(y_t)`` is unbiased for the KL at the visited states while the cap
    does not bind. A token's effect on later states is ignored. Raises ValueError if the batch has no teacher log-probs.
    """
    teacher = require(batch.teacher_logprobs, "reverse_kl needs the teacher's log-probs of the sampled tokens")
    now = output.logprobs.detach()
    weight = log_ratio(now, batch.behaviour_logprobs).exp().clamp(max=ratio_cap)
    return weight * log_ratio(now, teacher) * (output.logprobs - now).exp()


@distillations.register("jsd", needs=["teacher", "teacher_candidates"])
def jsd(output: PolicyOutput, batch: TokenBatch, *, teacher_share: OpenFraction = 0.5) -> Tensor:
    """Generalised Jensen-Shannon divergence over the vocabulary (Agarwal et al. 2023, arXiv:2306.13649).

    ``b KL(teacher || M) + (1 - b) KL(pi || M)`` with ``M = b teacher + (1 - b) pi``, b being ``teacher_share``; between
    0 and log 2 nats. b is strictly between 0 and 1: at either end the divergence is 0 for every policy.

    Needs ``teacher_candidates`` and ``output.candidates``: both distributions over the same K tokens, ``[T, K]``. K may
    be the vocabulary, or the teacher's most likely tokens; the remaining probability counts as one more token, so the
    result is at most the full divergence. Raises ValueError if one is missing.
    """
    needs = "jsd needs the log-probs of teacher and policy over the teacher's candidate tokens"
    teacher, policy = (_with_rest(require(each, needs)) for each in (batch.teacher_candidates, output.candidates))
    middle = teacher_share * teacher + (1 - teacher_share) * policy
    return teacher_share * _kl(teacher, middle) + (1 - teacher_share) * _kl(policy, middle)


def _with_rest(logprobs: Tensor) -> Tensor:
    """Convert ``[T, K]`` log-probs to ``[T, K + 1]`` probabilities, the last one being the remainder to 1."""
    p = logprobs.exp()
    return torch.cat([p, (1 - p.sum(-1, keepdim=True)).clamp(min=0)], -1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Compute ``sum p log(p / q)`` of ``[T, K]`` probabilities, ``[T]``; p = 0 counts 0 and has no gradient."""
    tiny = torch.finfo(p.dtype).tiny
    return (p * (p.clamp(min=tiny).log() - q.clamp(min=tiny).log())).sum(-1)
