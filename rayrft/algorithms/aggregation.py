"""Aggregations of per-token losses to a micro-batch's share of the step's loss.

An aggregation takes ``values`` ``[T]``, the batch whose mask selects the stream's tokens, and the stream's `Amount` in
the whole step. It returns a scalar; the sum over all micro-batches and ranks is the loss of the step.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rayrft.algorithms.batch import TokenBatch, keep
from rayrft.algorithms.loss import Amount
from rayrft.algorithms.pieces import Pieces, Positive

Aggregation = Callable[[Tensor, TokenBatch, Amount], Tensor]

aggregations: Pieces[Aggregation] = Pieces("aggregation")


@aggregations.register("token_mean")
def token_mean(values: Tensor, batch: TokenBatch, over: Amount) -> Tensor:
    """``1/T sum_i sum_t l_it``: every token counts the same, so long answers count for more (DAPO, Yu et al. 2025,
    arXiv:2503.14476)."""
    return keep(values, batch.mask).sum() / over.tokens


@aggregations.register("sequence_mean_token_mean", traits=["whole_answers"])
def sequence_mean_token_mean(values: Tensor, batch: TokenBatch, over: Amount) -> Tensor:
    """``1/N sum_i 1/|y_i| sum_t l_it``: every answer counts the same, so tokens of long answers count for less (GRPO,
    Shao et al. 2024, arXiv:2402.03300, eq. 3). Use it for losses of whole answers, which repeat on all their tokens."""
    return batch.mean(values).sum() / over.sequences


@aggregations.register("sequence_mean_token_sum")
def sequence_mean_token_sum(values: Tensor, batch: TokenBatch, over: Amount) -> Tensor:
    """``1/N sum_i sum_t l_it``: the log-likelihood of whole answers, not normalised by length."""
    return keep(values, batch.mask).sum() / over.sequences


@aggregations.register("constant", needs=["answer_length"])
def constant(values: Tensor, batch: TokenBatch, over: Amount, *, constant_length: Positive = 1024.0) -> Tensor:
    """``1/(N L) sum_i sum_t l_it`` with one L for all answers (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).

    L is the longest answer that may be sampled; its default in a run is `explorer.sampling.max_tokens`. It only scales
    the loss, which under Adam affects the gradient clipping and the balance with other streams.
    """
    return keep(values, batch.mask).sum() / (over.sequences * constant_length)
