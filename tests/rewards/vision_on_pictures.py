"""The vision reward on pictures: scikit-learn's 1,797 digits, alone, in rows and in grids, and drawn rectangles, whose
overlaps are counted in pixels.

``python -m tests.rewards.vision_on_pictures`` prints the table; scikit-learn is in the extra ``bench``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayrft.experience import Task
from rayrft.rewards import build_reward
from tests.rewards.scored import score

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
FORMS = (
    "{digit}",
    "{word}",
    "The answer is {digit}.",
    "I see a {digit}",
    r"\boxed{{{digit}}}",
    "It could be many things, but it is {word}.",
    "#### {digit}",
    "答案：{digit}",
)
SIDE = 64


@dataclass(frozen=True)
class Case:
    """A question about a picture, a response, and what that is worth."""

    form: str
    kind: str
    truth: str
    response: str
    worth: float
    metadata: dict[str, Any]


def digits(labels: np.ndarray, rng: np.random.Generator) -> Iterator[Case]:
    """Yield cases on pictures with these digits: each named in all forms, and another one; rows of six as text, and
    squares of nine as a grid, with some of them misread."""
    for label in labels:
        for form in FORMS:
            other = int(rng.choice([digit for digit in range(10) if digit != label]))
            for said in (int(label), other):
                response = form.format(digit=said, word=WORDS[said])
                yield Case(f"count {form}", "count", str(label), response, float(said == label), {})
    for row in labels[: len(labels) // 6 * 6].reshape(-1, 6):
        for wrong in range(4):
            read = row.copy()
            at = rng.permutation(6)[:wrong]
            read[at] = (read[at] + rng.integers(1, 10, wrong)) % 10
            # With another digit at a place, the distance may be smaller by a shift: leave these out.
            text, said = "".join(map(str, row)), "".join(map(str, read))
            if _distance(text, said) == wrong:
                yield Case(f"text, {wrong} of 6 misread", "text", text, said, 1 - wrong / 6, {})
        dropped = "".join(map(str, row[1:]))
        yield Case("text, 1 of 6 left out", "text", "".join(map(str, row)), f"The answer is {dropped}", 5 / 6, {})
    for square in labels[: len(labels) // 9 * 9].reshape(-1, 3, 3):
        wrong = int(rng.integers(0, 10))
        read = square.flatten()
        at = rng.permutation(9)[:wrong]
        read[at] = (read[at] + rng.integers(1, 10, wrong)) % 10
        truth = "\n".join("".join(map(str, line)) for line in square)
        for form, join in (("grid", ""), ("grid with blanks", " "), ("grid with commas", ", ")):
            said = "\n".join(join.join(map(str, line)) for line in read.reshape(3, 3))
            yield Case(form, "grid", truth, said, 1 - wrong / 9, {})
        yield Case("grid of another shape", "grid", truth, truth.splitlines()[0], 0.0, {})


def rectangles(count: int, rng: np.random.Generator) -> Iterator[Case]:
    """Yield cases on drawn rectangles: boxes, worth the share of pixels that both cover, and points in them or not."""
    for _ in range(count):
        truth, said = _rectangle(rng), _rectangle(rng)
        one, other = _drawn(truth), _drawn(said)
        overlap = float((one & other).sum() / (one | other).sum())
        shown = ", ".join(map(str, truth))
        for form in ("[{}, {}, {}, {}]", "<box>({},{}),({},{})</box>", "x1={}, y1={}, x2={}, y2={}"):
            yield Case(f"box {form}", "box", shown, form.format(*said), overlap, {})
            yield Case(f"box {form}", "box", shown, form.format(*truth), 1.0, {})
        x, y = (int(each) for each in rng.integers(0, SIDE, 2))
        centre = f"{(truth[0] + truth[2]) / 2}, {(truth[1] + truth[3]) / 2}"
        inside = float(_drawn((truth[0], truth[1], truth[2] + 1, truth[3] + 1))[y, x])
        yield Case("point", "point", centre, f"({x}, {y})", inside, {"box": list(truth)})


def disagreements(cases: list[Case]) -> list[tuple[Case, float | None]]:
    """Return the cases to which the reward gives another value, with that."""
    reward, found = build_reward("vision", {}), []
    for case in cases:
        task = Task.create("t", "q", case.truth, images=("p.png",), metadata={"kind": case.kind, **case.metadata})
        value = score(reward, task, case.response).value
        if value is None or abs(value - case.worth) > 1e-6:
            found.append((case, value))
    return found


def _rectangle(rng: np.random.Generator) -> tuple[int, int, int, int]:
    x1, x2 = sorted(int(each) for each in rng.choice(SIDE, 2, replace=False))
    y1, y2 = sorted(int(each) for each in rng.choice(SIDE, 2, replace=False))
    return x1, y1, x2, y2


def _drawn(box: tuple[int, int, int, int]) -> np.ndarray:
    """Return a mask ``[side, side]`` of what the box covers."""
    x1, y1, x2, y2 = box
    mask = np.zeros((SIDE + 1, SIDE + 1), bool)
    mask[y1:y2, x1:x2] = True
    return mask


def _distance(one: str, other: str) -> int:
    """Compute Levenshtein's distance by its table."""
    row = list(range(len(other) + 1))
    for number, letter in enumerate(one, 1):
        last, row = row, [number]
        for at, said in enumerate(other, 1):
            row.append(min(last[at] + 1, row[-1] + 1, last[at - 1] + (letter != said)))
    return row[-1]


if __name__ == "__main__":
    from collections import Counter

    from sklearn.datasets import load_digits

    rng = np.random.default_rng(0)
    cases = [*digits(load_digits().target, rng), *rectangles(2000, rng)]
    wrong = disagreements(cases)
    counts, failed = Counter(case.form for case in cases), Counter(case.form for case, _ in wrong)
    for form, number in counts.items():
        print(f"{form:50} {number:6} cases, {failed[form]} with another value")
    for case, value in wrong[:20]:
        print(case, value)
