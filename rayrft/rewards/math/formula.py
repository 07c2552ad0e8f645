"""Formulas in LaTeX or plain text: a parser, and their values in exact or 60-digit arithmetic.

The length of a text bounds its cost: values have at most ``_MOST_BITS`` bits, and only the operations below are
evaluated. Instead of computer algebra, formulas are equal if their values agree at random points (DeMillo & Lipton
1978, Schwartz 1980, Zippel 1979), exactly if all operations are rational.
"""

from __future__ import annotations

import operator
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import comb, factorial
from typing import Any

from rayrft.registry import Lazy

mpmath: Any = Lazy("mpmath")

_MOST_BITS, _LARGEST_FACTORIAL, _DEEPEST, _DIGITS, _AGREE, _POINTS = 20_000, 2_000, 40, 60, 45, 4


class Unreadable(ValueError):
    """The parser does not know the text as a formula."""


class TooLarge(Exception):
    """A value is too large to be computed."""


@dataclass(frozen=True)
class Node:
    """An operation (``+``, ``^``, ``sin`` …) with its operands; or a number or name without operands."""

    op: str
    args: tuple[Node, ...] = ()
    value: Fraction | str = ""

    def names(self) -> frozenset[str]:
        """Return the names of its variables."""
        if self.op == "name":
            return frozenset([str(self.value)])
        return frozenset[str]().union(*(arg.names() for arg in self.args))


_FUNCTIONS = {
    *("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh"),
    *("ln", "log", "lg", "exp"),
}
_SUMS = {"+": "+", "-": "-"}
_PRODUCTS = {**dict.fromkeys(["*", "\\cdot", "\\times", "\\ast"], "*"), **dict.fromkeys(["/", "\\div", ":"], "/")}
"""Operations by their signs."""
_STOPS = {"", "+", "-", "^", "_", "!", "%", "'", ")", "]", "}", "\\}", "\\rfloor", "\\rceil", *_PRODUCTS}
"""Tokens that do not begin a factor."""
CONSTANTS = {"\\pi", "e", "i"}
_CLOSING = {"(": ")", "[": "]", "{": "}", "|": "|", "\\{": "\\}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_TOKEN = re.compile(r"\s*(\\[A-Za-z]+|\\[{}]|\d+(?:\.\d+)?|\.\d+|[A-Za-z]|[-+*/^_!%()\[\]{}|':])")
_GREEK = re.compile(
    r"\\(?:alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|vartheta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau"
    r"|phi|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega|infty|ell|hbar)\Z"
)
_TEXT = re.compile(r"\s*\{([A-Za-z0-9 ]{1,20})\}")
_SUBSCRIPT = re.compile(r"\s*_\s*(?:\{([A-Za-z0-9+\-, ]{1,20})\}|([A-Za-z0-9]))")


def parse_formula(text: str) -> Node:
    """Parse a formula. Raises Unreadable for other text, TooLarge if it is nested too deeply."""
    parser = _Parser(text)
    node = parser.sum()
    if parser.peek():
        raise Unreadable(text)
    return node


class _Parser:
    """Recursive descent; a product without a sign binds more tightly than a division, as in math-verify."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth, self._bars = text.rstrip(), 0, 0, 0

    def peek(self) -> str:
        """Return the next token; empty at the end."""
        if self._at >= len(self._text):
            return ""
        if not (found := _TOKEN.match(self._text, self._at)):
            raise Unreadable(self._text)
        return found[1]

    def take(self) -> str:
        token = self.peek()
        if not token:
            raise Unreadable(self._text)
        self._at = _TOKEN.match(self._text, self._at).end()  # type: ignore[union-attr]
        return token

    def _skip(self, token: str) -> bool:
        """Take the next token if it is this one; return whether it was."""
        return self.peek() == token and bool(self.take())

    def _deeper(self, parse: Callable[[], Node]) -> Node:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise TooLarge("nested too deeply")
        node = parse()
        self._depth -= 1
        return node

    def sum(self) -> Node:
        """Parse terms with signs between them."""
        return self._deeper(lambda: self._chain(_SUMS, lambda: self._chain(_PRODUCTS, self._factors)))

    def _chain(self, ops: dict[str, str], operand: Callable[[], Node]) -> Node:
        """Parse operands with signs of such operations between them, from left to right."""
        node = operand()
        while op := ops.get(self.peek()):
            self.take()
            node = Node(op, (node, operand()))
        return node

    def _factors(self, *, argument: bool = False) -> Node:
        """Parse a signed product without signs between its factors, or the bare argument of a function."""
        if (sign := self.peek()) in {"+", "-"}:
            self.take()
            node = self._deeper(lambda: self._factors(argument=argument))
            return Node("neg", (node,)) if sign == "-" else node
        whole, node = re.match(r"\s*\d+\s*\\frac(?![A-Za-z])", self._text[self._at :]), self._power()
        while self._begins_factor(argument):
            last = self._power()
            mixed = whole and last.op == "/" and {arg.op for arg in last.args} == {"number"}
            node, whole = Node("+" if mixed else "*", (node, last)), None
        return node

    def _begins_factor(self, argument: bool) -> bool:
        token = self.peek()
        if token == "|":
            return self._bars == 0
        if token[:1] == "\\" and token[1:] in _FUNCTIONS:
            return not argument
        return token not in _STOPS

    def _power(self) -> Node:
        node = self._atom()
        while (token := self.peek()) in {"^", "!", "%"}:
            self.take()
            if token == "!" and node.op == "!":
                raise Unreadable("a double factorial")
            if token == "^":
                node = self._raised(node)
            else:
                node = Node("!", (node,)) if token == "!" else Node("/", (node, _number(100)))
        return node

    def _raised(self, base: Node) -> Node:
        if re.match(r"\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})", self._text[self._at :]):
            self._at = self._text.index("\\circ", self._at) + len("\\circ")
            self._skip("}")
            return Node("/", (Node("*", (base, Node("name", value="\\pi"))), _number(180)))
        minus, exponent = self._skip("-"), self._atom()
        if self._skip("^"):
            exponent = self._deeper(partial(self._raised, exponent))
        return Node("^", (base, Node("neg", (exponent,)) if minus else exponent))

    def _atom(self) -> Node:
        token = self.take()
        if token[0].isdigit() or token[0] == ".":
            return _number(token)
        if token in {"(", "[", "{", "\\{"}:
            return self._closed(_CLOSING[token])
        if token == "|":
            return Node("abs", (self._closed("|", self._bars + 1),))
        if token in {"\\lfloor", "\\lceil"}:
            return Node(token[2:], (self._closed(_CLOSING[token]),))
        if token in {"\\frac", "\\binom"}:
            return Node("/" if token == "\\frac" else "binom", (self._argument(), self._argument()))
        if token == "\\sqrt":
            degree = self._closed("]") if self._skip("[") else _number(2)
            return Node("^", (self._argument(), Node("/", (_number(1), degree))))
        if token[1:] in _FUNCTIONS and token[0] == "\\":
            return self._function(token[1:])
        if token in {"\\text", "\\mathrm"}:
            return self._named(token)
        if token.isalpha() or token == "\\pi" or _GREEK.match(token):
            if subscript := _SUBSCRIPT.match(self._text, self._at):
                self._at = subscript.end()
                token += "_" + (subscript[1] or subscript[2]).replace(" ", "")
            while self.peek() == "'":
                token += self.take()
            return Node("name", value=token)
        raise Unreadable(self._text)

    def _closed(self, closing: str, inner_bars: int = 0) -> Node:
        bars = self._bars
        self._bars = inner_bars
        node = self.sum()
        if self.take() != closing:
            raise Unreadable(self._text)
        self._bars = bars
        return node

    def _argument(self) -> Node:
        r"""Parse the argument of a command: a group, or one digit or letter (``\frac12``)."""
        if self._skip("{"):
            return self._closed("}")
        if digit := re.match(r"\s*(\d)", self._text[self._at :]):
            self._at += digit.end()
            return _number(digit[1])
        return self._deeper(self._atom)

    def _function(self, name: str) -> Node:
        base = self._argument() if name == "log" and self._skip("_") else _number(10)
        power = None
        if self._skip("^"):
            power = Node("neg", (self._atom(),)) if self._skip("-") else self._atom()
        bracketed = self.peek() in {"(", "["}
        node = self._closed(_CLOSING[self.take()]) if bracketed else self._factors(argument=True)
        if power is not None and power.op == "neg" and name in {"sin", "cos", "tan"}:
            name, power = "arc" + name, None
        if name == "lg":
            name = "log"
        applied = Node(name, (node, base) if name == "log" else (node,))
        return applied if power is None else Node("^", (applied, power))

    def _named(self, token: str) -> Node:
        if not (found := _TEXT.match(self._text, self._at)):
            raise Unreadable(self._text)
        self._at = found.end()
        name = found[1].strip()
        return Node("name", value=name if token == "\\text" or len(name) == 1 else f"{token}{name}")


def _number(value: str | int) -> Node:
    return Node("number", value=Fraction(value))


def values(node: Node, names: frozenset[str] | None = None) -> Iterator[Any]:
    """Yield the node's value, or with variables its values at points that depend on their names alone; None for an
    undefined value. Values are Fractions or mpmath's numbers. Raises TooLarge."""
    variables = sorted((node.names() if names is None else names) - CONSTANTS)
    with mpmath.workdps(_DIGITS):
        for point in range(_POINTS if variables else 1):
            env = {name: _sample(name, point) for name in variables}
            try:
                yield _bounded(_evaluate(node, env))
            except (ArithmeticError, ValueError):  # division by zero, or a pole
                yield None


def _sample(name: str, point: int) -> Fraction:
    """Return the value of a variable at a point; all are positive at the first point."""
    seed = zlib.crc32(f"{point}{name}".encode())
    value = Fraction(seed % 1997 + 503, 701)
    return -value if point and seed >> 20 & 1 else value


def agree(left: Any, right: Any, tolerance: float = 0.0) -> bool:
    """Whether two values are equal, or differ by at most this share of the first one."""
    if left is None or right is None:
        return False
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right or abs(left - right) <= Fraction(tolerance) * abs(left)
    with mpmath.workdps(_DIGITS):
        difference, size = abs(real(left) - real(right)), max(abs(real(left)), abs(real(right)))
        if mpmath.isnan(difference):
            return False
        return bool(difference <= max(mpmath.mpf(10) ** -_AGREE * max(size, 1e-5), tolerance * abs(real(left))))


def real(value: Any) -> Any:
    """Return a value as a number of mpmath."""
    if isinstance(value, Fraction):
        with mpmath.workdps(_DIGITS):
            return mpmath.mpf(value.numerator) / value.denominator
    return value


def _bounded(value: Any) -> Any:
    if isinstance(value, Fraction):
        too_large = value.numerator.bit_length() + value.denominator.bit_length() > 2 * _MOST_BITS
    elif not mpmath.isfinite(value):
        raise ValueError("not finite")
    else:
        too_large = value and abs(mpmath.mag(value)) > _MOST_BITS
    if too_large:
        raise TooLarge
    return value


def _evaluate(node: Node, env: dict[str, Fraction]) -> Any:
    if node.op == "number":
        return node.value
    if node.op == "name":
        name = str(node.value)
        known = {"\\pi": mpmath.pi, "e": mpmath.e, "i": mpmath.mpc(0, 1)}
        return +known[name] if name in known else env[name]
    args = [_bounded(_evaluate(arg, env)) for arg in node.args]
    if node.op in _RATIONAL:
        exact = all(isinstance(arg, Fraction) for arg in args)
        return _RATIONAL[node.op](*(args if exact else map(real, args)))
    if node.op == "^":
        return _raise(args[0], args[1])
    if node.op in {"!", "binom", "floor", "ceil"}:
        return _whole(node.op, args)
    [argument, *base] = map(real, args)
    if node.op in {"exp", "sinh", "cosh", "tanh"} and abs(argument) > _MOST_BITS:
        raise TooLarge
    if node.op in {"ln", "log"}:
        return mpmath.log(argument) / (mpmath.log(base[0]) if base else 1)
    return getattr(mpmath, _MPMATH.get(node.op, node.op))(argument)


_RATIONAL: dict[str, Callable[..., Any]] = {"neg": operator.neg, "abs": abs}
_RATIONAL |= {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_MPMATH = {"arcsin": "asin", "arccos": "acos", "arctan": "atan"}


def _raise(base: Any, exponent: Any) -> Any:
    """Return the power, exact if it is rational."""
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if base not in {0, 1, -1} and (bits - 1) * abs(exponent.numerator) > _MOST_BITS:
            raise TooLarge
        return base**exponent.numerator if base not in {1, -1} else base ** (exponent.numerator % 2)
    odd = isinstance(exponent, Fraction) and exponent.denominator % 2 and exponent.denominator > 1
    sign = -1 if odd and exponent.numerator % 2 else 1
    base, exponent = real(base), real(exponent)
    if odd and not mpmath.im(base) and mpmath.re(base) < 0:  # the real root of a negative number
        return sign * _raise(-base, exponent)
    if base and abs(exponent) * max(abs(mpmath.mag(base)), 1) > _MOST_BITS:
        raise TooLarge
    if not base and exponent.real <= 0:
        raise ValueError("no power of zero")
    return mpmath.power(base, exponent)


def _whole(op: str, args: list[Any]) -> Any:
    if op in {"floor", "ceil"}:
        return Fraction(int(getattr(mpmath, op)(real(args[0])).real))
    if not all(isinstance(arg, Fraction) and arg.denominator == 1 and arg >= 0 for arg in args):
        raise ValueError("not a whole number")
    if args[0] > _LARGEST_FACTORIAL:
        raise TooLarge
    whole = [arg.numerator for arg in args]
    return Fraction(factorial(whole[0]) if op == "!" else comb(*whole))
