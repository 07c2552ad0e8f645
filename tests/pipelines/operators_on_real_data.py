"""Cleaning, duplicates and decontamination on real tasks, with planted duplicates and leaked evaluation rows.

``RAYRFT_TEST_DATA=… python -m tests.pipelines.operators_on_real_data`` prints how many of each kind of plant are found,
and which rows are left out that nobody planted; with ``--show`` these and the missed ones. The folder holds GSM8K
(``gsm8k``), AGIEval (``agieval``) and HumanEval (``humaneval``).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from rayrft.config.pipelines import OperatorConfig
from rayrft.experience import Task
from rayrft.pipelines import Context
from rayrft.pipelines.chain import LeftOut, apply_link
from rayrft.pipelines.operators.synthesis import Problem
from tests.conftest import ROOT
from tests.pipelines.small import linked

DATA = Path(os.environ.get("RAYRFT_TEST_DATA", ROOT / "tests" / "samples"))


@dataclass(frozen=True)
class Row:
    """A question with its answer: ``id`` is ``original/…``, or ``<kind of plant>/…``."""

    id: str
    question: str
    answer: str

    @property
    def kind(self) -> str:
        return self.id.partition("/")[0]


def originals(train_only: bool = False) -> tuple[list[Row], list[Row]]:
    """Rows to train on, and evaluation rows: GSM8K's test file and each fifth row of the other sets."""
    train, test = list[Row](), list[Row]()
    for path in sorted(DATA.glob("*/*.jsonl")):
        for number, line in enumerate(path.open(encoding="utf-8")):
            row = json.loads(line)
            question = row.get("question") or row.get("prompt")
            if row.get("options"):
                question = "\n".join([question, *row["options"]])
            answer = row.get("answer") or row.get("canonical_solution") or row.get("label")
            found = Row(f"original/{path.stem}/{number}", question, str(answer))
            held_out = path.name == "test.jsonl" or (path.name != "train.jsonl" and number % 5 == 0)
            (test if held_out else train).append(found)
    return train, test


# Changes


def _words(text: str, count: int, rng: random.Random) -> str:
    """Other words in so many places."""
    parts = text.split(" ")
    for place in rng.sample(range(len(parts)), min(count, len(parts))):
        parts[place] = rng.choice(["thing", "really", "other", "place", "their", "quite"])
    return " ".join(parts)


def _fewer(text: str, rng: random.Random) -> str:
    """Without each twentieth word."""
    parts = text.split(" ")
    gone = set(rng.sample(range(len(parts)), max(1, len(parts) // 20)))
    return " ".join(word for place, word in enumerate(parts) if place not in gone)


def _turned(text: str, rng: random.Random) -> str:
    """Two neighbouring sentences in the other order."""
    parts = re.split(r"(?<=[.?!]) +", text)
    if len(parts) < 3:
        return f"{text} "
    place = rng.randrange(len(parts) - 1)
    parts[place], parts[place + 1] = parts[place + 1], parts[place]
    return " ".join(parts)


def _renamed(text: str, rng: random.Random) -> str:
    """The most frequent name is another one throughout."""
    names = Counter(re.findall(r"(?<=[a-z,] )[A-Z][a-z]+", text))
    if not names:
        return _words(text, 1, rng)
    return re.sub(rf"\b{names.most_common(1)[0][0]}\b", rng.choice(["Xanthe", "Quirin"]), text)


def _marked(text: str, rng: random.Random) -> str:
    """Other case, punctuation and white space."""
    return f"  {re.sub(r'[.,](?= |$)', ' ;', text).upper()}\n"


Change = Callable[[str, random.Random], str]
NEAR: dict[str, Change] = {
    "other case and punctuation": _marked,
    "one word replaced": lambda text, rng: _words(text, 1, rng),
    "two words replaced": lambda text, rng: _words(text, 2, rng),
    "each twentieth word missing": _fewer,
    "two sentences turned": _turned,
    "another name": _renamed,
    "a sentence in front": lambda text, rng: f"Please think about the following problem. {text}",
}
LEAKS: dict[str, Change] = {
    "as it is": lambda text, rng: text,
    "case and white space": lambda text, rng: f"  {text.upper()}\n",
    "case and punctuation": _marked,
    "within other text": lambda text, rng: f"Here is a task for you.\n\n{text}\n\nThink step by step.",
    "first half": lambda text, rng: text[: len(text) // 2],
    "three words replaced": lambda text, rng: _words(text, 3, rng),
}


def planted_duplicates(rows: list[Row], count: int, rng: random.Random) -> Iterator[Row]:
    """So many exact duplicates, and of each kind of near ones; then problems with other numbers, which are new."""
    for row in rng.sample(rows, min(count, len(rows))):
        yield Row(f"exact/{row.id}", row.question, row.answer)
    for name, change in NEAR.items():
        for row in rng.sample(rows, min(count, len(rows))):
            yield Row(f"near, {name}/{row.id}", change(row.question, rng), row.answer)
    made = 0
    for row in rng.sample(rows, len(rows)):
        problem = Problem.read(row.question, row.answer)
        varied = problem.vary(rng) if problem is not None else None
        if varied is not None and made < count:
            made += 1
            yield Row(f"new, other numbers/{row.id}", *varied)


def planted_leaks(test: list[Row], rng: random.Random) -> Iterator[Row]:
    """All evaluation rows in each form, with their answers; then their answers under another question."""
    for name, change in LEAKS.items():
        for row in test:
            yield Row(f"leak, {name}/{row.id}", change(row.question, rng), row.answer)
    for row in test:
        if len(row.answer.split()) >= 20:
            yield Row(f"leak, solution alone/{row.id}", f"Explain this (number {rng.randrange(10**6)}).", row.answer)


CLEANING = ("normalise", "strip_markup", "drop_broken", "mask_personal", "repetition", "language_mixing")


def left_out(rows: list[Row], *configs: OperatorConfig, evaluation: list[Row] = []) -> dict[str, list[LeftOut]]:  # noqa: B006
    """What operators leave out, by operator; the rows are one batch."""
    batch = pa.RecordBatch.from_pylist([vars(row) for row in rows])
    tasks = tuple(Task(row.id, row.question, row.answer) for row in evaluation)
    found: dict[str, list[LeftOut]] = {}
    for link in linked(batch, *configs, context=Context(tasks)):
        link.operator.prepare()
        if link.operator.scope == "all":
            link.operator.observe(batch)
            link.operator.settle()
        batch, outcome = apply_link(link, batch, 0)
        found[link.name] = outcome.left_out
    return found


def duplicates(train: list[Row], count: int, seed: int = 0) -> tuple[list[Row], dict[str, list[LeftOut]]]:
    """Rows with planted duplicates after them, and what is left out."""
    rows = [*train, *planted_duplicates(train, count, random.Random(seed))]
    names = ("normalise", "exact_duplicates", "near_duplicates")
    return rows, left_out(rows, *(OperatorConfig(name=name) for name in names))


def leaks(train: list[Row], test: list[Row], seed: int = 0) -> tuple[list[Row], dict[str, list[LeftOut]]]:
    """Rows with leaks among them, and what is left out."""
    rng = random.Random(seed)
    rows = [*train, *planted_leaks(test, rng)]
    rng.shuffle(rows)
    return rows, left_out(rows, OperatorConfig(name="decontaminate"), evaluation=test)


def table(rows: list[Row], gone: dict[str, list[LeftOut]]) -> Iterator[str]:
    """How many rows of each kind are left out, by operator."""
    by_operator = {name: Counter(row.row.partition("/")[0] for row in found) for name, found in gone.items()}
    yield f"| rows | {' | '.join(by_operator)} | left out |"
    yield "|---|" + "---|" * (len(by_operator) + 1)
    for kind, count in Counter(row.kind for row in rows).items():
        counts = [found[kind] for found in by_operator.values()]
        yield f"| {kind} ({count:,}) | {' | '.join(f'{each:,}' for each in counts)} | {sum(counts) / count:.2%} |"


def main() -> None:
    """Print the tables."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--count", type=int, default=500, help="plants of each kind of duplicate")
    arguments.add_argument("--show", action="store_true", help="print originals that are left out")
    options = arguments.parse_args()
    train, test = originals()
    cleaning = [OperatorConfig(name=name) for name in CLEANING]
    for title, (rows, gone) in {
        "Cleaning": (train, left_out(train, *cleaning)),
        "Duplicates": duplicates(train, options.count),
        "Leaks": leaks(train, test),
    }.items():
        print(f"\n{title}\n", *table(rows, gone), sep="\n")
        for each in (each for found in gone.values() for each in found if options.show):
            if each.row.startswith(("original", "new")):
                shown = (repr(each.values[name][:300]) for name in ("question", "answer"))
                print(f"{each.row}: {each.reason}", *shown, sep="\n    ")


if __name__ == "__main__":
    main()
