"""Policy losses that are linear in log-probs: REINFORCE, its off-policy variants, and rejection sampling.

``rho_t`` is the ratio of `rayrft.algorithms.ratios.token_ratio`, ``A_t`` the advantage, sg(.) stops the gradient.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from rayrft.algorithms.batch import TokenBatch
from rayrft.algorithms.pieces import Fraction, NonNegative, Positive
from rayrft.algorithms.ratios import TokenLoss, bounded, log_ratio, policy_losses, sequence_log_ratio, token_ratio


@policy_losses.register("reinforce")
def reinforce(logprobs: Tensor, batch: TokenBatch) -> TokenLoss:
    """``-A_t log pi(y_t)``, without an importance ratio (Williams 1992)."""
    return TokenLoss(-batch.advantages * logprobs)


@policy_losses.register("raft", traits=["selects"])
def raft(logprobs: Tensor, batch: TokenBatch) -> TokenLoss:
    """RAFT: ``-log pi(y_t)`` on tokens with A_t > 0, 0 on the others: SFT on the accepted answers (Dong et al. 2023,
    arXiv:2304.06767). The preset accepts answers above a threshold (`accept`), where the paper takes the best of K. The
    denominator still counts all tokens of usual rows: rejected answers shorten the step."""
    return TokenLoss(-(batch.advantages > 0).to(logprobs.dtype) * logprobs)


@policy_losses.register("opmd")
def opmd(logprobs: Tensor, batch: TokenBatch, *, tau: NonNegative = 1.0) -> TokenLoss:
    """OPMD: ``-A_t log pi(y_t) / (1 + tau)`` (Pan et al. 2025, arXiv:2505.17826): one step of mirror descent from the
    present policy, where regularisation of strength tau only shortens the step."""
    return TokenLoss(-batch.advantages * logprobs / (1 + tau))


@policy_losses.register("kimi", traits=["whole_answers", "one_advantage", "moves_at_zero"])
def kimi(logprobs: Tensor, batch: TokenBatch, *, tau: Positive = 0.1) -> TokenLoss:
    """Kimi k1.5's mirror descent: ``(A_i - tau h_i)^2 / (2 tau)``, ``h_i = log pi(y_i) - log pi_old(y_i)`` (Kimi Team
    2025, arXiv:2501.12599, sec. 2.3.2).

    A_i is the reward minus its group's mean (``advantage: dr_grpo``), which estimates tau log Z. The square is divided
    by 2 tau, so that its gradient, ``-(A_i - tau h_i) d log pi(y_i)``, is the paper's and initially REINFORCE's. A loss
    of whole answers.
    """
    error = batch.mean(batch.advantages) - tau * sequence_log_ratio(logprobs, batch)
    return TokenLoss(batch.spread(error.square() / (2 * tau)))


@policy_losses.register("topr")
def topr(logprobs: Tensor, batch: TokenBatch) -> TokenLoss:
    """TOPR: full weight for positive advantages, a truncated ratio for the others (Le Roux et al. 2025,
    arXiv:2503.14286).

    ``-A_i log pi(y_i)`` where A_i > 0, ``-sg(min(pi(y_i) / pi_old(y_i), 1)) A_i log pi(y_i)`` elsewhere. The ratio is
    that of the whole answer, as in the paper; Trinity-RFT uses token ratios (`topr_token`).
    """
    taper = batch.spread(sequence_log_ratio(logprobs, batch).detach().clamp(max=0).exp())
    return _tapered(logprobs, batch, taper)


@policy_losses.register("topr_token")
def topr_token(logprobs: Tensor, batch: TokenBatch) -> TokenLoss:
    """`topr` with the token ratio ``min(rho_t, 1)`` as the weight of advantages below 0."""
    return _tapered(logprobs, batch, token_ratio(logprobs, batch).detach().clamp(max=1))


@policy_losses.register("sppo")
def sppo(logprobs: Tensor, batch: TokenBatch, *, log_clip: Positive = 0.3) -> TokenLoss:
    """sPPO: ``-A_t log(clip(rho_t, 1/(1 + log_clip), 1 + log_clip))`` (Vaswani et al. 2022, arXiv:2108.05828; bounds as
    in Trinity-RFT). Unlike PPO's, the bound holds for either sign of A_t, and the gradient does not grow with rho_t."""
    bound = math.log1p(log_clip)
    ratio = log_ratio(logprobs, batch.old_logprobs)
    return TokenLoss(-batch.advantages * ratio.clamp(-bound, bound), ratio.detach().abs() > bound)


@policy_losses.register("rec")
def rec(
    logprobs: Tensor,
    batch: TokenBatch,
    *,
    keep_where: Literal["all", "one_side", "two_side", "ring"] = "one_side",
    weigh_by_ratio: bool = False,
    clip_low: Fraction = 0.2,
    clip_high: Positive = 0.2,
    ring_low: Fraction = 0.6,
    ring_high: Positive = 2.0,
) -> TokenLoss:
    """REC: group-relative REINFORCE with clipping and optional importance weights (Yao et al. 2025, arXiv:2509.24203).

    ``-M_t w_t A_t log pi(y_t)`` with w_t = sg(rho_t) or 1, and M_t = 1 where, for ``keep_where``,

    * ``one_side``: rho_t <= 1 + clip_high if A_t > 0, rho_t >= 1 - clip_low if A_t < 0. With the ratio as weight this
      has PPO's gradient, and with GRPO's advantages it is GRPO;
    * ``two_side``: 1 - clip_low <= rho_t <= 1 + clip_high;
    * ``ring``: as two_side, and also rho_t <= 1 - ring_low if A_t > 0, rho_t >= 1 + ring_high if A_t < 0: tokens that
      moved far in the wrong direction are corrected;
    * ``all``: everywhere.

    Bounds as in Trinity-RFT, whose own default is not to mask (``all``); the default here is the paper's
    REC-OneSide-NoIS.
    """
    ratio, advantages = token_ratio(logprobs, batch).detach(), batch.advantages
    inside = (ratio >= 1 - clip_low) & (ratio <= 1 + clip_high)
    up, down = advantages >= 0, advantages <= 0
    kept = {
        "all": torch.ones_like(inside),
        "one_side": (up & (ratio <= 1 + clip_high)) | (down & (ratio >= 1 - clip_low)),
        "two_side": inside,
        "ring": inside | (up & (ratio <= 1 - ring_low)) | (down & (ratio >= 1 + ring_high)),
    }[keep_where]
    weight = ratio if weigh_by_ratio else torch.ones_like(ratio)
    return TokenLoss(-torch.where(kept, weight * advantages, torch.zeros_like(weight)) * logprobs, ~kept)


@policy_losses.register("red_weight")
def red_weight(logprobs: Tensor, batch: TokenBatch, *, weight_tau: Positive = 1.0) -> TokenLoss:
    """RED-Weight: ``-exp(A_t / weight_tau) A_t log pi(y_t)`` (Yao et al. 2025, arXiv:2509.24203): like `asymre` it
    weighs successes more, here by the size of the advantage. The exponent is clamped to +-20."""
    weight = bounded(batch.advantages / weight_tau).exp()
    return TokenLoss(-weight * batch.advantages * logprobs)


def _tapered(logprobs: Tensor, batch: TokenBatch, taper: Tensor) -> TokenLoss:
    weight = torch.where(batch.advantages > 0, torch.ones_like(taper), taper)
    return TokenLoss(-weight * batch.advantages * logprobs)
