"""Policy losses that bound the ratio to the old policy: PPO and its variants.

``rho_t`` is the ratio of `rayrft.algorithms.ratios.token_ratio`, ``A_t`` the advantage, sg(.) stops the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rayrft.algorithms.batch import TokenBatch
from rayrft.algorithms.pieces import AboveOne, Fraction, Positive
from rayrft.algorithms.ratios import TokenLoss, bounded, log_ratio, policy_losses, sequence_log_ratio, token_ratio


@policy_losses.register("ppo")
def ppo(
    logprobs: Tensor,
    batch: TokenBatch,
    *,
    clip_low: Fraction = 0.2,
    clip_high: Positive = 0.2,
    dual_clip: AboveOne | None = None,
) -> TokenLoss:
    """The clipped surrogate of PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7), with separate upper and lower
    bounds ("clip higher", 0.28 in DAPO: Yu et al. 2025, arXiv:2503.14476).

    ``-min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t)``. With ``dual_clip`` c the loss of a token with
    A_t < 0 is at most ``-c A_t`` (Ye et al. 2020, arXiv:1912.09729, c = 3): the plain bound lets it grow with rho_t.
    """
    return _clip(token_ratio(logprobs, batch), batch.advantages, clip_low, clip_high, dual_clip)


@policy_losses.register("gspo", needs=["proximal"], traits=["whole_answers", "one_advantage"])
def gspo(logprobs: Tensor, batch: TokenBatch, *, clip_low: Fraction = 3e-4, clip_high: Positive = 4e-4) -> TokenLoss:
    """GSPO: one ratio for the whole answer (Zheng et al. 2025, arXiv:2507.18071).

    ``-min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)`` with the geometric mean of the token ratios,
    ``s_i = (pi(y_i) / pi_old(y_i))^(1/|y_i|)``, and A_i the mean advantage of the row. A loss of whole answers. The
    bounds are the paper's: s_i moves far less than a token's ratio.

    They are narrower than the rounding between engine and trainer in half precision, which would clip a third of the
    answers before the policy has moved. So pi_old is the trainer's own policy before its first update, and a correction
    (default `truncated`) weighs by its ratio to the behaviour policy.
    """
    s = batch.spread(batch.mean(log_ratio(logprobs, batch.old_logprobs)).exp())
    return _clip(s, batch.spread(batch.mean(batch.advantages)), clip_low, clip_high)


@policy_losses.register("gspo_token", needs=["proximal"], traits=["whole_answers"])
def gspo_token(
    logprobs: Tensor, batch: TokenBatch, *, clip_low: Fraction = 3e-4, clip_high: Positive = 4e-4
) -> TokenLoss:
    """GSPO-token: GSPO's ratio with per-token advantages (Zheng et al. 2025, arXiv:2507.18071).

    ``s_it = sg(s_i) pi(y_it) / sg(pi(y_it))`` replaces s_i: equal in value, and also in gradient if the advantages of a
    row are all equal. For pi_old see `gspo`.
    """
    s = batch.spread(batch.mean(log_ratio(logprobs, batch.old_logprobs)).exp()).detach()
    return _clip(s * (logprobs - logprobs.detach()).exp(), batch.advantages, clip_low, clip_high)


@policy_losses.register("cispo")
def cispo(logprobs: Tensor, batch: TokenBatch, *, clip_low: Fraction = 1.0, clip_high: Positive = 0.28) -> TokenLoss:
    """CISPO: REINFORCE weighted by a clipped ratio (MiniMax-M1, Chen et al. 2025, arXiv:2506.13585, eq. 4 and 5).

    ``-sg(clip(rho_t, 1 - clip_low, 1 + clip_high)) A_t log pi(y_t)``: every token keeps its gradient, also where PPO's
    clip would remove it. As in the paper there is no lower bound by default (clip_low 1). The paper tunes clip_high;
    0.28 as in Trinity-RFT.
    """
    ratio = token_ratio(logprobs, batch).detach()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    return TokenLoss(-bounded * batch.advantages * logprobs, bounded != ratio)


@policy_losses.register("sapo")
def sapo(
    logprobs: Tensor, batch: TokenBatch, *, tau_positive: Positive = 1.0, tau_negative: Positive = 1.05
) -> TokenLoss:
    """SAPO: a soft gate instead of the clip (Gao et al. 2025, arXiv:2511.20347).

    ``-4/tau sigmoid(tau (rho_t - 1)) A_t``, tau being ``tau_positive`` where A_t > 0, else ``tau_negative``. At
    rho_t = 1 the gradient is REINFORCE's; it decays on both sides, faster for greater tau.
    """
    ratio = token_ratio(logprobs, batch)
    tau = torch.full_like(ratio, tau_negative).masked_fill(batch.advantages > 0, tau_positive)
    gate = torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
    return TokenLoss(-gate * batch.advantages)


@policy_losses.register("importance")
def importance(logprobs: Tensor, batch: TokenBatch) -> TokenLoss:
    """Plain importance sampling, ``-rho_t A_t``, unbounded: unbiased for one step's distribution of tokens, and noisy
    as soon as the policies differ."""
    return TokenLoss(-token_ratio(logprobs, batch) * batch.advantages)


@policy_losses.register("importance_sequence", traits=["whole_answers", "one_advantage"])
def importance_sequence(logprobs: Tensor, batch: TokenBatch) -> TokenLoss:
    """Importance sampling of whole answers, ``-pi(y_i) / pi_old(y_i) A_i``: unbiased, with a variance that grows
    exponentially in length. The log-ratio is cut to +-20, once more after the sum. A loss of whole answers."""
    ratio = bounded(sequence_log_ratio(logprobs, batch)).exp()
    return TokenLoss(batch.spread(-ratio * batch.mean(batch.advantages)))


def _clip(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> TokenLoss:
    plain = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    clipped = bounded < plain
    gain = torch.minimum(plain, bounded)
    if dual_clip is not None:
        floor = dual_clip * advantages
        far = (advantages < 0) & (gain < floor)
        gain, clipped = torch.where(far, floor, gain), clipped | far
    return TokenLoss(-gain, clipped)
