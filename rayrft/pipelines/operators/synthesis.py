"""Operators that make rows of others, without a model."""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from random import Random
from typing import Any, ClassVar, TypeVar

import numpy as np
import pyarrow as pa
from pydantic import Field

from rayrft.config.base import Section
from rayrft.experience import reaches
from rayrft.pipelines.operator import Applied, Operator, TextColumn, Wants, copy_parents, register_operator
from rayrft.pipelines.rows import DERIVED, grouped, id_column, numbers, seeded


class VariationOptions(Section):
    question: TextColumn = "question"
    answer: TextColumn = "answer"
    """The worked solution, with its calculations between << and >> and the result after ####, as in GSM8K."""
    variations: int = Field(1, ge=1)
    """Rows to make of one, at most."""
    tries: int = Field(20, ge=1)
    """Draws of other numbers, for each."""
    seed: int = 0


@register_operator("numeric_variation")
class NumericVariation(Operator[VariationOptions]):
    """Make worked problems with other numbers. Numbers of the question that its calculations use once, and only there,
    are replaced at random, and the solution is calculated again. Two checks follow. The original solution must come out
    of the same calculation. Every new number must be true as it is written, positive where the original is, and have no
    more decimals.

    Numbers that might mean something else, such as 2 (half, twice), 7 (a week) or 100 (per cent), stay. A problem of
    which none can be varied for sure makes no row.
    """

    kind = "synthesise"

    def apply(self, rows: pa.RecordBatch) -> Applied:
        made, parents = list[tuple[str, str]](), list[int]()
        columns = (rows.column(name) for name in (id_column(rows.schema), self.options.question, self.options.answer))
        for index, (name, question, answer) in enumerate(zip(*(each.to_pylist() for each in columns), strict=True)):
            problem, rng = Problem.read(question or "", answer or ""), seeded(name, self.options.seed)
            tries, found = self.options.variations * self.options.tries, dict[tuple[str, str], None]()
            for varied in (problem.vary(rng) for _ in range(tries)) if problem is not None else ():
                if varied is not None:
                    found[varied] = None
                if len(found) == self.options.variations:
                    break
            made += found
            parents += [index] * len(found)
        questions, answers = ([each[at] for each in made] for at in (0, 1))
        return copy_parents(rows, parents, {self.options.question: questions, self.options.answer: answers})


_NUMBER = re.compile(r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?![\w]|[.,]\d)")
_PRINTED = re.compile(r"(?<![\w.])(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?![\d])")
_CALCULATION = re.compile(r"<<([^<>=]+)=([^<>=]+)>>")
_DECIMAL = r"(?:\d*+\.)?\d++"
_EQUATION = re.compile(
    rf"(?<!\d)({_DECIMAL}(?: *+[-+*/x] *+{_DECIMAL})++)(?: *= *({_DECIMAL})(?![\d.]*\d| *[-+*/x%] *\d))?"
)
"""A calculation in prose, without signs of money and commas, and what it is said to be (empty where nothing is)."""
_OPERAND = re.compile(r"\d+(?:\.\d+)?|\.\d+")
_AMBIGUOUS = set(
    map(Fraction, (*range(9), 10, 12, 20, 24, 25, 28, 29, 30, 31, 50, 52, 60, 75, 100, 180, 360, 365, 1000))
)


@dataclass(frozen=True)
class Problem:
    """A worked problem and those of its numbers that may be varied."""

    question: str
    answer: str
    steps: tuple[tuple[str, Fraction], ...]
    """Calculations in their order, with their results."""
    free: tuple[Fraction, ...]

    @classmethod
    def read(cls, question: str, answer: str) -> Problem | None:
        """Read a problem; None if it has no calculations, one of them is wrong, or no number may be varied."""
        steps = []
        for expression, printed in _CALCULATION.findall(answer):
            value = evaluate(expression)
            if value is None or value != evaluate(printed):
                return None
            steps.append((expression, value))
        if not steps or "####" not in answer or _final(answer) != steps[-1][1]:
            return None
        used = [[Fraction(number) for number in _OPERAND.findall(expression)] for expression, _ in steps]
        operands = Counter(chain(*used))
        results = Counter(value for _, value in steps)
        asked = Counter(_value(number) for number in _NUMBER.findall(question))
        free = tuple(
            value
            for value, count in asked.items()
            if count == 1
            and operands[value] == 1
            and value not in results
            and value not in _AMBIGUOUS
            # A number that the solution also works with in other words cannot be told apart from it.
            and value.denominator == 1
            and f"{value}%" not in question
        )
        # Results that are operands later on must be these results, and nothing that happens to be equal to them.
        known = set(asked)
        sources = known | _AMBIGUOUS | {value / 100 for value in known} | set(results)
        if not operands.keys() <= sources:  # a number that was calculated between the lines
            return None
        for place, (_, value) in enumerate(steps, start=1):
            if value in chain(*used[place:]) and (value in known or value in _AMBIGUOUS or results[value] > 1):
                return None
        return cls(question, answer, tuple(steps), free) if free else None

    def vary(self, rng: Random) -> tuple[str, str] | None:
        """Draw other numbers; return question and solution, or None if what comes out is not checked as right."""
        new = {value: Fraction(rng.randint(max(2, int(value) // 2), int(value) * 2)) for value in self.free}
        if any(drawn in _AMBIGUOUS for drawn in new.values()) or new.keys() == set(new.values()):
            return None
        values = dict(new)
        for expression, old in self.steps:
            value = evaluate(_OPERAND.sub(lambda found: _like(found[0], values), expression))
            if value is None or value <= 0 < old or values.get(old, value) != value:
                return None
            places, most = _places(value), _places(old)
            if places is None or (most is not None and places > most):
                return None
            values[old] = value
        question = _NUMBER.sub(lambda found: _like(found[0], new), self.question)
        answer = _PRINTED.sub(lambda found: _like(found[0], values), self.answer)
        return (question, answer) if question != self.question and _holds(answer, values, self.steps) else None


def _holds(answer: str, values: Mapping[Fraction, Fraction], steps: tuple[tuple[str, Fraction], ...]) -> bool:
    """Return whether every calculation of a solution is true as it is written, and the result is that of the last."""
    found = _CALCULATION.findall(answer)
    if len(found) != len(steps):
        return False
    for (expression, printed), (_, old) in zip(found, steps, strict=True):
        if not evaluate(expression) == evaluate(printed) == values[old]:
            return False
    for expression, printed in _EQUATION.findall(re.sub("<<[^<>]*>>|[$,]", "", answer)):
        if printed and evaluate(expression.replace("x", "*")) != evaluate(printed):
            return False
    return _final(answer) == values[steps[-1][1]]


def _final(answer: str) -> Fraction | None:
    """Return the result that a solution names after ####."""
    return evaluate(answer.rpartition("####")[2].strip().replace(",", ""))


def evaluate(expression: str) -> Fraction | None:
    """Return the exact value of numbers, + - * / and parentheses; None for anything else, and for a division by 0."""
    try:
        return _evaluated(ast.parse(expression.strip(), mode="eval").body, expression.strip())
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _evaluated(node: ast.expr, source: str) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(ast.get_source_segment(source, node) or "")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluated(node.operand, source)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_evaluated(node.left, source), _evaluated(node.right, source))
    raise ValueError(f"{type(node).__name__} is not a calculation")


def _value(printed: str) -> Fraction:
    return Fraction(printed.replace(",", ""))


def _places(value: Fraction) -> int | None:
    """Return how many decimals a number has; None if they do not end, or are more than ten."""
    return next((places for places in range(11) if (value * 10**places).denominator == 1), None)


def _like(printed: str, values: Mapping[Fraction, Fraction]) -> str:
    """Write what takes a number's place, with commas if it has some."""
    old = _value(printed)
    new = values.get(old)
    if new is None or new == old:
        return printed
    if "," in printed and new.denominator == 1:
        return f"{new.numerator:,}"
    return f"{float(new):.{max(len(printed.partition('.')[2]), _places(new) or 0)}f}"


class GroupOptions(Section):
    keep: bool = False
    """Whether the rows of the groups stay."""


G = TypeVar("G", bound=GroupOptions)


class GroupSynthesis(Operator[G]):
    """An operator that makes expert rows of groups of experiences: a subclass implements `choose`."""

    kind = "synthesise"
    scope = "group"
    columns: ClassVar[Mapping[str, Wants]] = {
        **dict.fromkeys(("experience_id", "group_id", "source", "pair_id"), "text"),
        **dict.fromkeys(("token_ids", "logprobs"), "list"),
        **{"reward": "number", "labels": "map", "chosen": "any"},
    }

    def apply(self, rows: pa.RecordBatch) -> Applied:
        rewards = numbers(rows, "reward")
        lengths = np.array([len(ids or ()) for ids in rows.column("token_ids").to_pylist()])
        chosen, used = list[int](), set[int]()
        groups = rows.column("group_id").to_pylist()
        for indices in grouped(groups):
            known = [index for index in indices if rewards[index] == rewards[index]]
            if known and (found := self.choose(known, rewards, lengths)):
                chosen += found
                used.update(indices)
        columns = {"source": ["expert"] * len(chosen), **self.fields([groups[index] for index in chosen])}
        reasons = [DERIVED if index in used else "nothing was made of its group" for index in range(rows.num_rows)]
        return replace(copy_parents(rows, chosen, columns), reasons=[] if self.options.keep else reasons)

    def choose(self, known: list[int], rewards: np.ndarray, lengths: np.ndarray) -> list[int]:
        """Return the rows of a group to make expert rows of, by index, of the ``known`` ones: those with a reward."""
        raise NotImplementedError

    def fields(self, groups: list[str]) -> Mapping[str, list[Any]]:
        """Return further columns of the rows that are made, by the groups that they are made of."""
        return {}


class PairOptions(GroupOptions):
    min_gap: float = Field(0.5, gt=0)
    """Smallest difference of rewards that makes a pair."""


@register_operator("best_against_worst")
class BestAgainstWorst(GroupSynthesis[PairOptions]):
    """Make a preference pair of each group of experiences: its best answer, chosen, against its worst, rejected; of
    equal rewards the shortest. The two rows follow each other, the chosen one first, as demonstrations of pairs do."""

    def choose(self, known: list[int], rewards: np.ndarray, lengths: np.ndarray) -> list[int]:
        best = min(known, key=lambda index: (-rewards[index], lengths[index]))
        worst = min(known, key=lambda index: (rewards[index], lengths[index]))
        return [best, worst] if reaches(rewards[best] - rewards[worst], self.options.min_gap) else []

    def fields(self, groups: list[str]) -> Mapping[str, list[Any]]:
        return {"pair_id": [f"{group}/pair" for group in groups], "chosen": [True, False] * (len(groups) // 2)}


class ExpertOptions(GroupOptions):
    min_reward: float = 1.0
    """Rewards from here on are right."""
    max_pass_rate: float = Field(0.5, ge=0, le=1)
    """Only groups of which at most this share is right."""
    per_group: int = Field(1, ge=1)
    """Rows to make of a group, the shortest first."""


@register_operator("expert_rows")
class ExpertRows(GroupSynthesis[ExpertOptions]):
    """Make expert rows of the right answers to hard tasks: of groups of experiences in which few are right."""

    def choose(self, known: list[int], rewards: np.ndarray, lengths: np.ndarray) -> list[int]:
        right = [index for index in known if reaches(rewards[index], self.options.min_reward)]
        hard = reaches(self.options.max_pass_rate * len(known), len(right))
        return sorted(right, key=lambda index: lengths[index])[: self.options.per_group] if hard else []
