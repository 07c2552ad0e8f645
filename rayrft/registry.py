"""Registries of named pieces for configs (rewards, task sources, workflows, losses …), and plugins that add to them."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Generic, TypeVar

from rayrft.errors import ConfigError, RayrftError, nearest

T = TypeVar("T")

_PLUGIN = "rayrft_plugin_"
"""Begins the names of plugins' modules."""


class Registry(Generic[T]):
    """A mapping from name to piece; the error for an unknown name suggests the nearest known one. Pieces that are
    ``alike`` are called with the positional parameters of the first one, and others are refused."""

    def __init__(self, kind: str, *, alike: bool = False) -> None:
        self.kind, self._alike = kind, alike
        self._pieces: dict[str, T] = {}
        self._elsewhere: dict[str, str] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers a piece as ``name``. Raises ConfigError if another piece has the name; the
        same one may be defined again, as when a notebook cell is rerun."""

        def add(piece: T) -> T:
            if name in self._pieces and _origin(self._pieces[name]) != _origin(piece):
                problem = f"a {self.kind} of this name exists"
                raise ConfigError(problem, "choose another name", field=self.kind, value=name)
            self._pieces[name] = piece
            return piece

        return add

    def register_at(self, name: str, place: str) -> None:
        """Register what is at ``package.module:attribute`` as ``name``; it is imported when it is looked up."""
        self._elsewhere[name] = place

    def get(self, name: str, field: str | None = None) -> T:
        """Return the piece of this name, or the one at ``package.module:attribute``. Raises ConfigError if it cannot be
        imported or called, or, with the nearest known name, if there is none."""
        module, colon, attribute = self._elsewhere.get(name, name).partition(":")
        if not colon:
            if name in self._pieces:
                return self._callable(self._pieces[name], name, field)
            problem, remedy = f"unknown {self.kind}", nearest(name, self)
        else:
            try:
                return self._callable(getattr(importlib.import_module(module), attribute), name, field)
            except (ImportError, AttributeError) as error:
                problem = f"cannot be imported: {error}"
                remedy = (
                    "fix the module, list its file under plugins, or give package.module:attribute of an installed one"
                )
        raise ConfigError(problem, remedy, field=field or self.kind, value=name)

    def _callable(self, piece: T, name: str, field: str | None) -> T:
        """Return a piece. Raises ConfigError if it cannot be called as the first one is."""
        if self._alike:
            given = [each for each in _positional(next(iter(self._pieces.values()))) if each.default is each.empty]
            try:
                inspect.Signature(_positional(piece)).bind(*given)
            except TypeError as error:
                remedy = f"a {self.kind} takes ({', '.join(each.name for each in given)})"
                raise ConfigError(f"cannot be called: {error}", remedy, field=field or self.kind, value=name) from None
        return piece

    def __iter__(self) -> Iterator[str]:
        return iter([*self._pieces, *self._elsewhere])


def _positional(piece: Any) -> list[inspect.Parameter]:
    return [each for each in inspect.signature(piece).parameters.values() if each.kind is not each.KEYWORD_ONLY]


def _origin(piece: Any) -> tuple[str, str] | int:
    """Return the definition site of a function or class, by its file; the identity of any other piece."""
    if not hasattr(piece, "__qualname__"):
        return id(piece)
    return getattr(sys.modules.get(piece.__module__), "__file__", None) or piece.__module__, piece.__qualname__


class Lazy:
    """A module that is imported at its first use: importing rayrft must be quick, and needs no Ray."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)

    def __reduce__(self) -> tuple[Any, ...]:
        return Lazy, (self._module,)


def check_installed(module: str, remedy: str, error: type[RayrftError], field: str, value: str) -> None:
    """Raise ``error`` unless a package is installed, by the name of its module."""
    if importlib.util.find_spec(module) is None:
        raise error(f"needs a package that is not installed: {module}", remedy, field=field, value=value)


def loaded_plugins() -> tuple[Path, ...]:
    """Return the files that `load_plugins` has run in this process."""
    return tuple(Path(str(module.__file__)) for name, module in sorted(sys.modules.items()) if name.startswith(_PLUGIN))


def load_plugins(paths: Iterable[Path]) -> None:
    """Run Python files that register pieces, in every process that looks these up. An unchanged file is not run again.
    They can import each other, and the files beside them, by name. Raises ConfigError with the path and the cause."""
    for path in paths:
        try:
            source = path.read_bytes()
        except OSError as error:
            remedy = "give the path of a Python file that every node can read"
            raise ConfigError(f"cannot be read: {error.strerror}", remedy, field="plugins", value=str(path)) from None
        name = f"{_PLUGIN}{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
        digest = hashlib.blake2b(source).hexdigest()
        if getattr(sys.modules.get(name), "__digest__", None) == digest:
            continue
        module = types.ModuleType(name)
        module.__file__ = str(path)
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))  # last: nothing that is installed is hidden
        found = PathFinder.find_spec(path.stem)
        names = [name] if found is None or found.origin != str(path) else [name, path.stem]
        sys.modules.update(dict.fromkeys(names, module))
        try:
            exec(compile(source, str(path), "exec"), module.__dict__)
        except Exception as error:  # a user's file may raise anything
            for each in names:
                del sys.modules[each]
            problem = f"cannot be loaded: {type(error).__name__}: {error}"
            remedy = "fix the file: it must run as a standalone script, in a folder with what it imports"
            raise ConfigError(problem, remedy, field="plugins", value=str(path)) from error
        vars(module)["__digest__"] = digest
