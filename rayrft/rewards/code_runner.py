"""The script that `code.py` sends into the sandbox of a solution, and of its tests.

    compile FILE           report whether the file compiles
    program FILE [PATH …]  run the file as a script, with packages from the paths
    solve [PATH …]         load a solution, then answer calls of its function
    check [PATH …]         run tests, and send out their calls of the function

``solve`` and ``check`` read lines of Python literals, which the process outside made, and write lines of JSON. A value
that JSON lacks, such as a tuple, is an object of one key, its type. Output of a solution is never evaluated. The script
imports little, as every program waits for it.
"""

from __future__ import annotations

import sys
from _json import encode_basestring_ascii as _quote

TYPE_CHECKING = False  # typing takes longer to import than a program to start
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_DEEPEST = 40


class NotPlain(Exception):
    """A value that is not made of plain types."""


def encode_value(value: Any, depth: int = _DEEPEST) -> str:
    """Return a value of plain types, or of types derived from them, as JSON. Raises NotPlain for others."""
    if depth == 0:
        raise NotPlain("a value that is nested too deep")
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quote(value)
    if isinstance(value, int):
        return int.__repr__(value) if -(2**63) < value < 2**63 else f'{{"int": "{int.__format__(value, "x")}"}}'
    if isinstance(value, float):
        text = float.__repr__(value)
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(text, text)
    if isinstance(value, complex):
        return f'{{"complex": [{encode_value(value.real)}, {encode_value(value.imag)}]}}'
    if isinstance(value, bytes):
        return f'{{"bytes": "{bytes.hex(value)}"}}'
    if isinstance(value, dict):
        pairs = [f"[{', '.join(encode_value(each, depth - 1) for each in pair)}]" for pair in dict.items(value)]
        return f'{{"dict": [{", ".join(pairs)}]}}'
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            own: Any = kind.__iter__  # whatever a class derived from it says
            items = f"[{', '.join(encode_value(each, depth - 1) for each in own(value))}]"
            return items if kind is list else f'{{"{kind.__name__}": {items}}}'
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode_value(value.tolist(), depth - 1)
    raise NotPlain(f"a {type(value).__name__}")


_NAMES: dict[str, Any] = {"__builtins__": {}, "nan": float("nan"), "inf": float("inf")}
_NAMES |= {kind.__name__: kind for kind in (set, frozenset, dict, complex)}


def _conversation() -> tuple[Iterator[Any], Callable[[str], None]]:
    """Return the incoming messages and a function that sends; the program's own stdin and stdout become empty."""
    import os

    incoming, outgoing = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="ascii")
    nothing = os.open("/dev/null", os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)

    def send(line: str) -> None:
        outgoing.write(line + "\n")
        outgoing.flush()

    return (eval(line, dict(_NAMES)) for line in incoming), send


def _module(name: str) -> dict[str, Any]:
    """Return the names of a new module, in which classes can be pickled and dataclasses find their names."""
    import builtins

    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # as `site` does
    module = type(sys)(name)
    sys.modules[name] = module
    return module.__dict__


def _run(source: str, names: dict[str, Any], title: str) -> None:
    exec(compile(source, title, "exec"), names)


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def solve() -> None:
    """Load the solution, then answer calls."""
    incoming, send = _conversation()
    orders = next(incoming)
    names = _module("solution")
    _run(orders["before"], names, "prompt.py")
    send('{"ready": true}')  # later lines may be the solution's
    try:
        _run(orders["source"], names, "solution.py")
        function = _function(orders["name"], names)
    except BaseException as error:
        send(f'{{"failed": {_quote(_shown(error))}}}')
        return
    send('{"loaded": true}')
    kept: list[Any] = []
    for number, name, args, kwargs in incoming:
        try:
            value = names[name] if number is None and name else function if number is None else kept[number]
            if number is not None and name:
                value = getattr(value, name)
            if args is not None:
                value = value(*args, **kwargs)
            answer = f'{{"value": {encode_value(value)}}}'
        except NotPlain:
            kept.append(value)
            answer = f'{{"object": [{len(kept) - 1}, {_quote(type(value).__name__)}]}}'
        except BaseException as error:
            answer = f'{{"raised": [{_quote(type(error).__name__)}, {_quote(str(error)[:500])}]}}'
        send(answer)


def _function(name: str, names: dict[str, Any]) -> Callable[..., Any]:
    """Return the function or class of this name, or a function that calls the method of a new ``Solution``."""
    if name in names:
        return names[name]
    method = name.removeprefix("Solution").removeprefix("()").removeprefix(".")
    if not hasattr(names.get("Solution"), method):
        raise NameError(f"name {name!r} is not defined")
    return lambda *args, **kwargs: getattr(names["Solution"](), method)(*args, **kwargs)


class _Gone(BaseException):
    """The solution does not answer."""


def _exception(name: str, message: str) -> Exception:
    """Return the solution's exception if it is built in, else a RuntimeError."""
    import builtins

    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message)
        except TypeError:  # it takes more than a message
            pass
    return RuntimeError(f"{name}: {message}")


def check() -> None:
    """Run the tests of a solution in another sandbox."""
    incoming, send = _conversation()
    orders = next(incoming)
    thrown: list[BaseException] = []
    calls = 0

    def ask(number: int | None, name: str, args: Any = None, kwargs: Any = None) -> Any:
        nonlocal calls
        owner = "null" if number is None else number
        send(f'{{"call": [{owner}, {_quote(name)}, {encode_value(args)}, {encode_value(kwargs or {})}]}}')
        answer = next(incoming)
        calls += 1
        if "value" in answer:
            return answer["value"]
        if "object" in answer:
            return Object(*answer["object"])
        if "raised" in answer:
            thrown.append(_exception(*answer["raised"]))
        else:
            thrown.append(_Gone(answer["wrong"]))
        raise thrown[-1]

    class Object:
        """An object in the solution's sandbox."""

        def __init__(self, number: int, kind: str) -> None:
            self._number, self._kind = number, kind

        def __getattr__(self, name: str) -> Any:
            return ask(self._number, name)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return ask(self._number, "", args, kwargs)

        def _is_compared(self, *_: Any) -> Any:
            if orders["name"][0].isupper():  # tests of a class expect objects
                raise NotPlain(f"a {self._kind}")
            thrown.append(_Gone(f"it returned a {self._kind}"))
            raise thrown[-1]

    def special(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any) -> Any:
            try:
                bound = ask(self._number, name)
            except AttributeError:  # `list` asks for a length, and takes no other error
                raise TypeError(f"a {self._kind} has no {name}") from None
            return bound(*args)

        return method

    for name in ("len", "iter", "next", "getitem", "setitem", "delitem", "contains", "str", "repr", "enter", "exit"):
        setattr(Object, f"__{name}__", special(f"__{name}__"))
    for name in ("eq", "ne", "lt", "le", "gt", "ge", "bool", "hash", "add", "radd", "sub", "rsub", "mul", "rmul"):
        setattr(Object, f"__{name}__", Object._is_compared)

    def candidate(*args: Any, **kwargs: Any) -> Any:
        return ask(None, "", args, kwargs)

    names = _module("tests")
    try:
        _run(orders["before"], names, "prompt.py")
        names["Solution"] = lambda *args, **kwargs: ask(None, "Solution", args, kwargs)
        names["candidate"] = names[orders["name"]] = candidate
        _run(orders["source"], names, "tests.py")
    except Exception as error:
        send(f'{{"broken": {_quote(_shown(error))}}}')
        return
    for number, statement in enumerate(orders["statements"]):
        calls = 0
        try:
            _run(statement, names, f"test {number}")
        except NotPlain as error:
            send(f'{{"broken": {_quote(f"a test passes on or compares {error}")}}}')
        except BaseException as error:
            own = error not in thrown and (calls == 0 or isinstance(error, NameError | ImportError | SyntaxError))
            what = str(error) if isinstance(error, _Gone) else _shown(error)
            send(f'{{"{"broken" if own else "failed"}": {_quote(what)}}}')
        else:
            send('{"passed": true}')


def main() -> None:
    mode, *paths = sys.argv[1:]
    if mode == "solve" or mode == "check":
        sys.path += paths
        solve() if mode == "solve" else check()
        return
    file, *paths = paths
    with open(file, encoding="utf-8") as source:
        code = compile(source.read(), file, "exec")
    if mode == "program":
        sys.argv[:] = [file]
        sys.path += paths
        exec(code, _module("__main__"))


if __name__ == "__main__":
    main()
