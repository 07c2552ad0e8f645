"""Models learn by GRPO from rewards that score what they do: code in its sandbox, and questions of school."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

import rayrft
from tests.bench.lessons import choices, programs


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("lesson", "steps", "gain"), [(choices, 20, 0.4), (programs, 30, 0.3)])
def test_grpo_learns_what_few_of_its_demonstrations_show(
    lesson: ModuleType, steps: int, gain: float, tmp_path: Path
) -> None:
    """A part of the steps of the lessons `choices` and `programs`: so much above the start, sampled."""
    lesson.write_task(tmp_path, seed=1)
    run = rayrft.start(lesson.make_config(tmp_path, seed=1, steps=steps, controls=False), say=lambda _: None)
    summary = run.result()
    assert summary.status == "finished" and summary.ledger.closes
    found = run.evaluations().query("stage == 'grpo' and temperature == 1.0")["accuracy"]
    assert found.iloc[-1] >= found.iloc[0] + gain, run.evaluations()
