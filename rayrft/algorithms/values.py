"""Per-token advantages from a critic, per-token KL penalties, and the critic's losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from rayrft.algorithms.batch import TokenBatch, keep
from rayrft.algorithms.pieces import Fraction, Pieces, Positive, require

TokenAdvantage = Callable[[Tensor, TokenBatch], tuple[Tensor, Tensor]]
"""From ``rewards`` ``[T]`` to advantages and returns, both ``[T]``; all are zero off the mask."""

ValueLoss = Callable[[Tensor, TokenBatch], Tensor]
"""From the critic's new ``values`` ``[T]`` to a loss per token, ``[T]``."""

token_advantages: Pieces[TokenAdvantage] = Pieces("advantage")
value_losses: Pieces[ValueLoss] = Pieces("value_loss")


@dataclass(frozen=True)
class ActionTokens:
    """The masked-in tokens of a batch row after row, so that consecutive action tokens of a row are adjacent; those off
    the mask come last. Prompts, observations and padding are skipped."""

    order: Tensor
    """``[T]``: index of every such token in the batch."""
    row: Tensor
    """``[T]``: its row; N for those off the mask."""
    present: Tensor
    """``[T]`` bool: whether it is on the mask."""

    @classmethod
    def of(cls, batch: TokenBatch) -> Self:
        row, order = torch.where(batch.mask, batch.sequence, batch.rows).sort(stable=True)
        return cls(order, row, row < batch.rows)

    def gather(self, values: Tensor) -> Tensor:
        """Arrange ``[T]`` values of the batch, with zeros for those off the mask."""
        return keep(values[self.order], self.present)

    def scatter(self, values: Tensor) -> Tensor:
        """Arrange values as they are in the batch."""
        return torch.empty_like(values).index_copy(0, self.order, values)

    def after(self, values: Tensor, distance: int = 1) -> Tensor:
        """Return for every token the value of the row's token at this ``distance`` after it; 0 if there is none."""
        later, same = values[distance:], self.row[distance:] == self.row[:-distance]
        return torch.nn.functional.pad(keep(later, same), (0, distance))

    def to_go(self, values: Tensor, discount: float = 1.0) -> Tensor:
        """Compute ``S_t = x_t + discount S_{t+1}`` of arranged values, the discounted sum to the row's end.

        By doubling (Hillis and Steele 1986): after k rounds S_t holds the first 2^k terms. Values and lengths of other
        rows do not change a bit of the result.
        """
        reach = 1
        while reach < len(values):
            values = values + discount**reach * self.after(values, reach)
            reach *= 2
        return values


def token_rewards(batch: TokenBatch, penalty: Tensor | None = None) -> Tensor:
    """Return token rewards ``[T]``: the rewards of turns and steps on the last token of each, plus a row's reward on
    its last action token, minus a penalty on every action token. For a KL in the reward the penalty is ``kl_coef``
    times the KL (Ouyang et al. 2022, arXiv:2203.02155).

    Raises ValueError if the batch has no rewards.
    """
    reward = require(batch.reward, "token rewards need the rewards of the rows")
    index = torch.arange(batch.mask.numel(), device=batch.mask.device)
    last = index.new_zeros(batch.rows).scatter_reduce(0, batch.sequence, keep(index, batch.mask), "amax")
    rewards = keep(batch.spread(reward.to(batch.advantages.dtype)), batch.mask & (batch.spread(last) == index))
    if batch.turn_rewards is not None:
        rewards = rewards + keep(batch.turn_rewards, batch.mask)
    return rewards if penalty is None else rewards - keep(penalty, batch.mask)


@token_advantages.register("gae", needs=["critic"], traits=["varies_in_row"])
def gae(
    rewards: Tensor, batch: TokenBatch, *, gamma: Fraction = 1.0, lam: Fraction = 1.0, bootstrap_truncated: bool = False
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16) over the action tokens.

    ``delta_t = r_t + gamma V_{t+1} - V_t``, ``A_t = delta_t + gamma lam A_{t+1}``, ``R_t = A_t + V_t``. Observations
    and prompts are skipped: t + 1 is the row's next action token, and after the last one V and A are 0. So the tokens
    of a tool's answer neither discount nor have values. Advantages are not normalised here. With a KL in the reward,
    or rewards of turns or steps, ``r_t`` is not 0 before the last token.

    An answer truncated for its length did not end. With ``bootstrap_truncated`` V after its last token is the critic's
    value of the state in which it was cut, instead of 0, the value of an end (Pardo et al. 2018, arXiv:1712.00378).
    Without it, a cut answer gets its reward alone, which depends on `reward.truncated`.

    Raises ValueError if the batch has no values.
    """
    actions = ActionTokens.of(batch)
    value = actions.gather(require(batch.values, "gae needs the critic's values"))
    after = actions.after(value)
    if bootstrap_truncated:
        lacks = "bootstrapping needs the critic's values of the states in which answers were truncated"
        continues = actions.after(actions.present)
        final = torch.nn.functional.pad(require(batch.final_values, lacks), (0, 1))[actions.row]  # 0 off the mask
        after = torch.where(continues, after, final)
    advantage = actions.to_go(actions.gather(rewards) + gamma * after - value, gamma * lam)
    return actions.scatter(advantage), actions.scatter(advantage + value)


def with_penalty(batch: TokenBatch, penalty: Tensor) -> TokenBatch:
    """Return the batch with advantages ``A_t - sum_{i >= t} penalty_i``, over the action tokens i of usual rows. These
    are token rewards for advantages that are constant within an answer. In REINFORCE++ (Hu et al. 2025,
    arXiv:2501.03262) A_t is the reward and the penalty ``kl_coef`` times the KL.

    Group baselines do not include the penalty. (verl subtracts the penalty of the whole answer from its reward, before
    groups are compared.)
    """
    usual = batch.usual()
    actions = ActionTokens.of(usual)
    to_go = actions.to_go(actions.gather(penalty))
    return replace(batch, advantages=batch.advantages - actions.scatter(to_go))


def row_value_errors(batch: TokenBatch) -> Tensor:
    """Compute the mean of ``|R_t - V_t|`` over the action tokens of a row, ``[N]``. It is the TD error of Schaul et al.
    2016 (arXiv:1511.05952), here of the lambda-return that `gae` computes. 0 for expert rows.

    Raises ValueError if the batch has no returns or values.
    """
    usual = batch.usual()
    values = require(usual.values, "errors of values need the critic's values")
    return usual.mean((_returns(usual) - values).abs())


@value_losses.register("squared")
def squared(values: Tensor, batch: TokenBatch) -> Tensor:
    """``1/2 (V_t - R_t)^2``. Raises ValueError if the batch has no returns."""
    return 0.5 * (values - _returns(batch)).square()


@value_losses.register("clipped")
def clipped(values: Tensor, batch: TokenBatch, *, value_clip: Positive = 0.2) -> Tensor:
    """``1/2 max((V_t - R_t)^2, (clip(V_t, V_old - value_clip, V_old + value_clip) - R_t)^2)`` (OpenAI Baselines' PPO2;
    also TRL and verl). Values that already moved far from the old ones in this step have no gradient.

    Raises ValueError if the batch has no returns or old values.
    """
    old = require(batch.values, "the clipped value loss needs the critic's old values")
    near = old + (values - old).clamp(-value_clip, value_clip)
    returns = _returns(batch)
    return 0.5 * torch.maximum((values - returns).square(), (near - returns).square())


def _returns(batch: TokenBatch) -> Tensor:
    return require(batch.returns, "a value loss needs returns")
