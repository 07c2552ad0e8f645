"""Pieces: registered functions, their coefficients, and the inputs that they need from a run.

A piece's keyword-only parameters are its coefficients; their annotations define the accepted values. So your own piece
is one decorated function, and its coefficients become config keys without further code.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar, cast

from rayrft.errors import ConfigError
from rayrft.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

NONE = "none"
"""The name for no piece."""

Coefficient = float | int | bool | str | Mapping[str, float] | None

Need = Literal[
    "rollouts",
    "expert",
    "reference",
    "critic",
    "pairs",
    "labels",
    "reference_kl",
    "proximal",
    "teacher",
    "teacher_logprobs",
    "teacher_candidates",
    "greedy_baseline",
    "turns",
    "states",
    "components",
    "answer_length",
]
"""Inputs of an algorithm besides rewards and behaviour log-probs. Pieces name them; `Algorithm.needs` adds ``rollouts``
and ``expert``, usual and expert rows."""

Trait = Literal[
    "whole_answers", "one_advantage", "moves_at_zero", "selects", "compares", "varies_in_row", "no_gradient"
]
"""Properties of a piece.

* ``whole_answers``: a policy loss that repeats the loss of an answer on all its tokens, to be counted once per answer;
  an aggregation that counts it once.
* ``one_advantage``: a policy loss that uses one advantage per answer, the mean over its tokens.
* ``moves_at_zero``: a policy loss with a gradient at advantage 0.
* ``selects``: an advantage or a policy loss that accepts or rejects an answer, so that small changes of an advantage
  have no meaning.
* ``compares``: an advantage that is 0 for the only answer to a task.
* ``varies_in_row``: an advantage that may differ between the tokens of a row.
* ``no_gradient``: a KL whose gradient is 0 on average.
"""


@dataclass(frozen=True)
class Bound:
    """The accepted numbers of a coefficient: what they must do, and whether a number does."""

    text: str
    accepts: Callable[[float], bool]


Fraction = Annotated[float, Bound("lie in [0, 1]", lambda x: 0 <= x <= 1)]
OpenFraction = Annotated[float, Bound("lie in (0, 1)", lambda x: 0 < x < 1)]
BelowHalf = Annotated[float, Bound("lie in [0, 0.5)", lambda x: 0 <= x < 0.5)]
Positive = Annotated[float, Bound("be above 0", lambda x: 0 < x < math.inf)]
NonNegative = Annotated[float, Bound("be at least 0", lambda x: 0 <= x < math.inf)]
AboveOne = Annotated[float, Bound("be above 1", lambda x: 1 < x < math.inf)]
Weight = Annotated[float, Bound("be finite", math.isfinite)]
Steps = Annotated[int, Bound("be at least 0", lambda x: x >= 0)]
Count = Annotated[int, Bound("be at least 1", lambda x: x >= 1)]


@dataclass(frozen=True)
class Piece(Generic[F]):
    """A registered function. ``coefficients`` maps its keyword-only parameters to their defaults."""

    kind: str
    name: str
    function: F
    needs: frozenset[Need]
    traits: frozenset[Trait]
    coefficients: Mapping[str, Coefficient]

    def bind(self, values: Mapping[str, Coefficient]) -> F:
        """Bind the values of the function's own coefficients."""
        return cast(F, functools.partial(self.function, **{k: v for k, v in values.items() if k in self.coefficients}))

    def fault(self, coefficient: str, value: Coefficient) -> str | None:
        """Return why a value is invalid, such as ``must lie in [0, 1]``; None if it is valid."""
        return fault(value, _parameters(self.function).get(coefficient))


def require(value: T | None, problem: str) -> T:
    """Return an input of a piece. Raises ValueError, which says what is missing, if it is None."""
    if value is None:
        raise ValueError(problem)
    return value


class Pieces(Generic[F]):
    """A registry of pieces of one kind, which share their positional parameters and result type."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._functions: Registry[F] = Registry(kind, alike=True)
        # By function, so that a registered function that is named by its path keeps its needs and traits.
        self._properties: dict[F, tuple[frozenset[Need], frozenset[Trait]]] = {}

    def register(self, name: str, *, needs: Iterable[Need] = (), traits: Iterable[Trait] = ()) -> Callable[[F], F]:
        """Return a decorator that registers a function as ``name``. Raises ConfigError if the name is taken."""

        def add(function: F) -> F:
            self._functions.register(name)(function)
            self._properties[function] = frozenset(needs), frozenset(traits)
            return function

        return add

    def get(self, name: str) -> Piece[F]:
        """Return the piece of this name, or the function at ``package.module:attribute``, which has no needs and traits
        unless registered. Raises ConfigError if there is none."""
        function = self._function(name)
        defaults = {key: parameter.default for key, parameter in _keywords(function).items()}
        needs, traits = self._properties.get(function, (frozenset(), frozenset()))
        return Piece(self.kind, name, function, needs, traits, defaults)

    def __contains__(self, name: str) -> bool:
        """Return whether a function is registered, by name or path. Raises ConfigError if a path leads to nothing."""
        return self._function(name) in self._properties if ":" in name else name in set(self._functions)

    def _function(self, name: str) -> F:
        return self._functions.get(name, f"algorithm.{self.kind}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)


def fault(value: Coefficient, hint: Any) -> str | None:
    """Return why a value does not fit the annotation ``hint``; None if it fits, or ``hint`` is not of numbers, flags,
    strings and mappings of names to them."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        faults = [fault(value, member) for member in arguments]
        return None if None in faults else faults[0]
    if origin is Annotated:
        kind, bound = arguments
        return fault(value, kind) or (None if bound.accepts(cast(float, value)) else f"must {bound.text}")
    if origin is Mapping:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            return "must be a mapping of names to numbers"
        named = {key: fault(each, arguments[1]) for key, each in value.items()}
        return next((f"of {key!r} {wrong}" for key, wrong in named.items() if wrong), None)
    if origin is Literal:
        return None if value in arguments else f"must be one of {', '.join(map(str, arguments))}"
    if hint is type(None):
        return None if value is None else "must be left out"
    accepted, called = _KINDS.get(hint, ((object,), "fit"))
    fits = isinstance(value, accepted) and (hint not in (float, int) or not isinstance(value, bool))
    return None if fits else f"must be {called}"


_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    float: ((float, int), "a number"),
    int: ((int,), "a whole number"),
    bool: ((bool,), "true or false"),
    str: ((str,), "text"),
}


@functools.cache
def _keywords(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the keyword-only parameters. Raises ConfigError on one without a default."""
    found = {k: v for k, v in inspect.signature(function).parameters.items() if v.kind is v.KEYWORD_ONLY}
    for key, parameter in found.items():
        if parameter.default is inspect.Parameter.empty:
            raise ConfigError("a coefficient needs a default", field=f"{function.__qualname__}.{key}")
    return found


@functools.cache
def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(function, include_extras=True)
