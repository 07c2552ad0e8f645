"""The library math-verify, behind what keeps it from evaluating anything large or running any code.

Its extraction from a response is not used: it takes quadratic time in the length of some texts, and evaluates what
looks like arithmetic by sympy's ``parse_expr``, which is Python's ``eval``. What is parsed here is a short text of
known commands, by the grammar of latex2sympy2_extended, which evaluates nothing of its input as Python.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

from rayrft.rewards.formula import TooLarge, Unreadable

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off
_LONGEST, _DEEPEST, _MOST_BITS = 300, 6, 5_000


class OutOfTime(BaseException):
    """The limit has passed. No Exception, for sympy goes on after many of these."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the block after so many seconds of the process's own time, so that a busy machine decides
    nothing; only in the main thread, where signals can do so. One long step of an extension module, such as a power of
    large integers, still runs to its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGVTALRM, stop)
    # Again and again, for what is raised in a callback of the interpreter is only printed.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.05)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


_COMMANDS = {
    *(
        "frac",
        "sqrt",
        "pi",
        "infty",
        "sum",
        "prod",
        "int",
        "lim",
        "to",
        "rightarrow",
        "log",
        "ln",
        "exp",
        "cdot",
        "times",
    ),
    *("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "max", "min"),
    *("div", "pm", "mp", "le", "ge", "ne", "in", "notin", "cup", "cap", "setminus", "emptyset", "varnothing", "mid"),
    *("mathbb", "text", "mathrm", "lfloor", "rfloor", "lceil", "rceil", "circ", "begin", "end", "pmatrix", "bmatrix"),
    *(
        "alpha",
        "beta",
        "gamma",
        "delta",
        "epsilon",
        "theta",
        "kappa",
        "lambda",
        "mu",
        "nu",
        "xi",
        "rho",
        "sigma",
        "tau",
    ),
    *("phi", "varphi", "chi", "psi", "omega", "Gamma", "Delta", "Theta", "Lambda", "Sigma", "Phi", "Psi", "Omega"),
    *("vec", "hat", "bar", "overline", "prime", "ldots", "cdots", "dots", "equiv", "bmod", "pmod", "binom"),
}
_POWER = re.compile(r"\^\s*(?:\{|\()")
_LARGE = re.compile(r"\d{13}|\^\s*-?\d{4}|\d{4}\s*!|[)}!]\s*!|\\binom[^}]*\d{4}|[eE][+-]?\d{3}")


def verify(truth: str, answer: str, seconds: float) -> bool:
    """Whether math-verify takes the answer for the truth; both are normalized LaTeX.

    Raises Unreadable with the text that it cannot parse, TooLarge for what would take long, and OutOfTime.
    """
    from math_verify import verify as equal  # before the limit: a first import takes seconds

    with time_limit(seconds):
        both = parse(truth), parse(answer)
        try:
            return bool(equal(*both, allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True))
        except (RecursionError, MemoryError):
            raise TooLarge(answer) from None
        except Exception:  # of sympy's, on what it has no comparison for
            return False


@lru_cache(maxsize=256)
def parse(text: str) -> Any:
    """Parse LaTeX. Raises Unreadable or TooLarge."""
    from latex2sympy2_extended.latex2sympy2 import (  # type: ignore[import-untyped]
        NormalizationConfig,
        latex2sympy,
        normalize_latex,
    )
    from math_verify.grader import should_treat_as_complex

    _screen(text)
    usual = NormalizationConfig(basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none")
    try:
        latex = normalize_latex(text, usual)
        parsed = latex2sympy(latex, is_real=not should_treat_as_complex(latex), normalization_config=None)
    except Exception:  # of the parser's, which raises all kinds
        raise Unreadable(text) from None
    if _bits(parsed) > _MOST_BITS:
        raise TooLarge(text)
    return parsed


def _screen(text: str) -> None:
    """Refuse what the parser would take long for, or evaluate while it reads."""
    unknown = set(re.findall(r"\\([A-Za-z]+)", text)) - _COMMANDS
    if unknown or re.search(r"__|[;'\"`@#]", text):
        raise Unreadable(text)
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    if len(text) > _LONGEST or deepest > _DEEPEST or _LARGE.search(text):
        raise TooLarge(text)
    for power in _POWER.finditer(text):
        exponent = text[power.end() : _end(text, power.end())]
        constant = not re.search(r"(?<!\\)\b[a-zA-Z]", re.sub(r"\\[A-Za-z]+", "", exponent))
        if constant and ("^" in exponent or "!" in exponent or re.search(r"\d{4}", exponent)):
            raise TooLarge(text)


def _end(text: str, start: int) -> int:
    depth = 1
    for at in range(start, len(text)):
        depth += (text[at] in "({") - (text[at] in ")}")
        if not depth:
            return at
    return len(text)


def _bits(expression: Any) -> float:
    """Return about how many bits the largest number has that evaluating the expression would meet."""
    import sympy  # type: ignore[import-untyped]

    args = [_bits(arg) for arg in getattr(expression, "args", ())]
    if isinstance(expression, sympy.Integer):
        return int(expression).bit_length()
    if isinstance(expression, sympy.Pow):
        if expression.exp.is_number:
            return float("inf") if args[1] > 16 else max(args[0], 1) * 2.0 ** args[1]
        return sum(args)
    if isinstance(expression, sympy.factorial | sympy.gamma | sympy.exp):
        return 0.0 if expression.free_symbols else float("inf") if args[0] > 16 else 16 * 2.0 ** args[0]
    if isinstance(expression, sympy.Sum | sympy.Product):
        largest = max((_bits(bound) for limit in expression.limits for bound in limit[1:]), default=0.0)
        return float("inf") if largest > 13 else max(args)
    return sum(args) if isinstance(expression, sympy.Mul) else max(args, default=1.0)
