"""Losses of reward models, which score whole answers: from the scores of pairs to a loss per pair.

``scores`` are those of both answers to a prompt, ``[2, P]`` with gradient, the chosen one's first, and ``margin``
``[P]`` is by how much that is the better one, on the scale of the scores, if it is known. A loss returns ``[P]``; the
share of a step is its sum divided by the step's number of pairs.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn.functional import logsigmoid

from rayrft.algorithms.pieces import NonNegative, Pieces
from rayrft.algorithms.preference import difference

RewardModelLoss = Callable[[Tensor, Tensor | None], Tensor]

reward_model_losses: Pieces[RewardModelLoss] = Pieces("reward_model")


@reward_model_losses.register("bradley_terry", needs=["pairs"])
def bradley_terry(scores: Tensor, margin: Tensor | None = None, *, center: NonNegative = 0.0) -> Tensor:
    """``-log sigmoid(r_w - r_l - margin) + center (r_w + r_l)^2`` with scores r_w of the chosen and r_l of the rejected
    answer (Ouyang et al. 2022, arXiv:2203.02155, eq. 1; margin: Touvron et al. 2023, "Llama 2", arXiv:2307.09288,
    sec. 3.2.2).

    The first term knows only differences; ``center`` keeps the scores of a prompt around 0, so that those of different
    prompts can be compared (Eisenstein et al. 2023, arXiv:2312.09244; 0.01 in TRL's examples, where it is off by
    default, too).
    """
    gap = difference(scores) if margin is None else difference(scores) - margin
    return -logsigmoid(gap) + center * scores.sum(0).square()
