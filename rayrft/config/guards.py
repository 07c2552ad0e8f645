"""Config of guards: bounds of the metrics of steps."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rayrft.config.base import Changeable, Section, invalid, section_rule
from rayrft.errors import nearest

_NAMES = (
    "usual_rows expert_rows reward sampled_rows sampled_tokens truncated_share staleness_mean staleness_max "
    "probe_gap tokens_per_s step_s wait_s train_s sync_s loss policy_loss sft_loss preference_loss "
    "distillation_loss value_loss value_grad_norm kl kl_coef entropy_coef grad_norm lr entropy clip_fraction "
    "ratio correction_weight logprob_gap pair_accuracy pair_margin pair_score good_score bad_score label_margin "
    "good_logprob bad_logprob reference_kl policy_tokens expert_tokens skipped_updates rollout_s reward_s "
    "pipeline_s"
)
METRICS = _NAMES.split()
"""Numbers of a `StepRecord`, by name."""


class GuardConfig(Section):
    """Bounds of a metric, such as ``{field: reward, below: 0.05, steps: 10, action: hold}``."""

    field: str
    """A number of the steps in ``metrics.jsonl``. A step without it is passed over."""
    above: Changeable[float | None] = None
    """The guard acts above this value, or if it is not a number."""
    below: Changeable[float | None] = None
    """The guard acts below this value, or if it is not a number."""
    steps: Changeable[int] = Field(1, ge=1)
    """Consecutive steps out of bounds after which the guard acts: once, until a step is within bounds again."""
    action: Changeable[Literal["warn", "hold", "stop"]] = "warn"
    """Write a note; pause the run until ``rayrft unpause``; or write a checkpoint and end the run as failed."""

    @section_rule
    def _check(self) -> None:
        if self.field not in METRICS:
            remedy = nearest(self.field, METRICS)
            raise invalid("field", "is not a number of the step's record", remedy, value=self.field)
        if self.above is None and self.below is None:
            raise invalid("above", "or below is required", "give a bound")

    def crossed(self, value: float) -> str:
        """Return which bound a value is beyond, as text; empty if it is within bounds."""
        if self.above is not None and not value <= self.above:
            return f"above {self.above:g}"
        return f"below {self.below:g}" if self.below is not None and not value >= self.below else ""
