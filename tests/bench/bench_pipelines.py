"""What five cheap operators on experiences add to a step of MIX: the quickstart's steps with and without them, in turn,
in either order.

Of a run, the steps after the first five count. ``verifying`` is the wall time of a step in which any group was with its
operators, most of it beside rollouts; ``work`` is what the operators took of it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import rayrft
from rayrft.config import load_config
from rayrft.monitor.records import StepRecord
from tests.bench.helpers import parse, spread
from tests.conftest import ROOT

_OPERATORS: list[dict[str, Any]] = [
    {"name": "repetition", "column": "response"},
    {"name": "language_mixing", "column": "response"},
    {"name": "expression", "where": "len(response) < 100"},
    {"name": "outliers", "column": "reward", "deviations": 10},
    {"name": "reward_deviation"},
]
_WARM_UP = 5


def steps_of(folder: Path, number: int, operators: list[dict[str, Any]], steps: int) -> list[StepRecord]:
    """Return the records of a run's MIX steps."""
    changes = {
        "name": f"bench-{number}-{len(operators)}",
        "storage": str(folder),
        "pipelines.experiences": operators,
        "tasks.eval_size": 10,
        "stages.warmup.steps": 200,
        "stages.mix.steps": _WARM_UP + steps,
        "stages.mix.evaluate_every": None,
        "evaluation.temperatures": [0.0],
    }
    run = rayrft.start(load_config(ROOT / "jobs" / "quickstart.yaml", changes), say=lambda _: None)
    run.result()
    records = [each for each in run.records() if isinstance(each, StepRecord) and each.stage == "mix"]
    return records[_WARM_UP:]


def main() -> None:
    options = parse(__doc__, rounds=4, steps=(30, "steps that are measured, of each run"))
    folder, ratios = Path(tempfile.mkdtemp(prefix="bench-")), list[float]()
    for number in range(options.rounds):
        sides: dict[bool, list[StepRecord]] = {}
        for operators in ([], _OPERATORS) if number % 2 else (_OPERATORS, []):
            sides[bool(operators)] = steps_of(folder, number, operators, options.steps)
        without, with_them = sides[False], sides[True]
        medians = [float(np.median([each.step_s for each in records])) for records in (without, with_them)]
        ratios.append(medians[1] / medians[0])
        verifying = np.median([each.timings.pipeline_s for each in with_them])
        work = np.median([sum(stats.seconds for stats in each.timings.operators.values()) for each in with_them])
        print(
            f"{number}: a step takes {medians[0]:.3f} s, with operators {medians[1]:.3f} s ({ratios[-1]:.3f}); "
            f"verifying {verifying:.3f} s, work {work:.3f} s of it",
            flush=True,
        )
    print(f"ratio {spread(ratios, '.3f')}")


if __name__ == "__main__":
    main()
