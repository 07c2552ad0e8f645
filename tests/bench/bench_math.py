"""Math rewards per second of one core, beside plain math-verify, in one run.

    python -m tests.bench.bench_math [--answers 300] [--rounds 5]

Both judge the same responses, half of them right, in turn; caches of what was read are emptied before every round, so
nothing but the ground truths of a round's own groups is read once for several responses. ``RAYRFT_TEST_DATA`` names the
folder of GSM8K and of MATH from AGIEval; without MATH only a few rows of GSM8K are judged.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import statistics
import time
from collections.abc import Sequence

from rayrft.rewards.math import reading
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


def rate(judge: str, cases: Sequence[real.Case]) -> float:
    """Rewards per second of processor time."""
    reading.read_answer.cache_clear()
    start = time.process_time()
    for case in cases:
        JUDGES[judge](case.truth, case.response)
    return len(cases) / (time.process_time() - start)


def main() -> None:
    """Print the table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--answers", type=int, default=300)
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    print("| rewards/s of one core, median (range) | " + " | ".join(JUDGES) + " | ratio |")
    for name, cases in workloads(options.answers).items():
        for judge in JUDGES:
            rate(judge, cases[:50])
        rates = {judge: list[float]() for judge in JUDGES}
        for _ in range(options.rounds):
            for judge, found in rates.items():
                found.append(rate(judge, cases))
        middle = {judge: statistics.median(found) for judge, found in rates.items()}
        cells = (f"{middle[judge]:,.0f} ({min(found):,.0f}-{max(found):,.0f})" for judge, found in rates.items())
        print(f"| {name} | " + " | ".join(cells) + f" | {middle['rayrft'] / middle['math-verify']:.1f} |")


if __name__ == "__main__":
    main()
