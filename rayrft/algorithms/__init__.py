"""The algorithm library, in pure torch: no Ray, no vLLM, no I/O.

An `Algorithm` names one piece per registry: advantage, policy loss, aggregation, correction, KL, entropy, SFT and so
on. Every piece is one function, whose docstring gives formula and paper, and whose keyword-only parameters are its
coefficients. Your own piece is registered by a decorator such as ``@policy_losses.register("mine")``.

Shapes: ``[T]`` are the tokens of one micro-batch, flat, ``[N]`` its rows (`TokenBatch`). Every loss is a *sum* over the
micro-batch divided by a denominator that is global to the optimiser step (all ranks, all micro-batches). So the sum of
the parts gives the same loss and gradient for every split of the batch.
"""

from rayrft.algorithms.advantages import GroupFacts, group_advantages, group_relative_advantages
from rayrft.algorithms.algorithm import Algorithm, Coefficients
from rayrft.algorithms.batch import PolicyOutput, TokenBatch, chosen_logprobs
from rayrft.algorithms.corrections import corrections
from rayrft.algorithms.distillation import distillations
from rayrft.algorithms.kl import entropies, kls
from rayrft.algorithms.loss import Denominators, LossParts, aggregations, count
from rayrft.algorithms.pieces import Fraction, NonNegative, Positive, Steps
from rayrft.algorithms.preference import Pairs, preferences, reward_model_losses, rows_by_pair
from rayrft.algorithms.presets import build, presets
from rayrft.algorithms.ratios import TokenLoss, policy_losses, token_ratio
from rayrft.algorithms.sft import mu_schedules, sft_losses
from rayrft.algorithms.unpaired import Labelled, sum_gains, unpaired_losses
from rayrft.algorithms.values import row_value_errors, token_advantages, value_losses

__all__ = [
    "Algorithm", "Coefficients", "Denominators", "Fraction", "GroupFacts", "Labelled", "LossParts", "NonNegative",
    "Pairs", "PolicyOutput", "Positive", "Steps", "TokenBatch", "TokenLoss", "aggregations", "build", "chosen_logprobs",
    "corrections", "count", "distillations", "entropies", "group_advantages", "group_relative_advantages", "kls",
    "mu_schedules", "policy_losses", "preferences", "presets", "reward_model_losses", "row_value_errors",
    "rows_by_pair", "sft_losses", "sum_gains", "token_advantages", "token_ratio", "unpaired_losses", "value_losses",
]  # fmt: skip
