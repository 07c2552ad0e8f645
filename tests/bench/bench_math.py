"""Math rewards per second of one core, beside plain math-verify, in one run.

Both judge the same responses, half of them right, in turn; caches of what was read are emptied before every round.
``RAYRFT_TEST_DATA`` names the folder of GSM8K and of MATH from AGIEval; without MATH a few rows of GSM8K are judged.
"""

from __future__ import annotations

import itertools
import logging
import random
from functools import partial

import numpy as np

from rayrft.rewards.math import reading
from tests.bench.helpers import parse, race, spread
from tests.rewards import math_on_real_data as real

JUDGES = {"rayrft": real.rayrft, "math-verify": real.math_verify}


def workloads(answers: int) -> dict[str, list[real.Case]]:
    """Responses by style."""
    rng = random.Random(0)
    solutions = rng.sample(real.gsm8k(), min(answers, len(real.gsm8k())))
    cases = list(real.gsm8k_cases(solutions))
    found = {
        "GSM8K, solutions": [case for case in cases if case.form == "gsm8k: solution"],
        "GSM8K, 13 forms": rng.sample(cases, min(answers, len(cases))),
    }
    if (real.DATA / "agieval").exists():
        rows = real.math_answers()
        boxed = [real.Case("", row, real.STYLES[0](row), True) for row in rows]
        others = [real.Case("", row, real.STYLES[0](other), False) for row, other in itertools.pairwise(rows)]
        formulas = [case for case in real.math_cases(rows, others=2) if not case.truth.lstrip("-").isdigit()]
        found["MATH, boxed"] = rng.sample(boxed + others, min(answers, len(boxed)))
        found["MATH, rewritten, no integers"] = rng.sample(formulas, min(answers, len(formulas)))
    return found


def judge_all(judge: str, cases: list[real.Case]) -> None:
    reading.read_answer.cache_clear()
    for case in cases:
        JUDGES[judge](case.truth, case.response)


def main() -> None:
    options = parse(__doc__, answers=300, rounds=5)
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    print("| rewards/s of one core, median (range) | " + " | ".join(JUDGES) + " | ratio |")
    for name, cases in workloads(options.answers).items():
        times = race({judge: partial(judge_all, judge, cases) for judge in JUDGES}, options.rounds, warm_up=1)
        rates = [len(cases) / times[judge][:, 1] for judge in JUDGES]
        ours, theirs = map(np.median, rates)
        print(f"| {name} | " + " | ".join(spread(each, ",.0f") for each in rates) + f" | {ours / theirs:.1f} |")


if __name__ == "__main__":
    main()
