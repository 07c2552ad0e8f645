"""Named pieces that a config refers to: rewards, task sources, workflows, presets."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from rayrft.errors import ConfigError, nearest

T = TypeVar("T")


class Registry(Generic[T]):
    """A mapping from name to piece; an unknown name is an error that names the nearest known one."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._pieces: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: make the piece known as ``name``. Raises ConfigError where the name is taken."""

        def add(piece: T) -> T:
            if name in self._pieces:
                raise ConfigError(
                    f"a {self.kind} of this name exists",
                    field=self.kind,
                    value=name,
                    remedy="choose another name",
                )
            self._pieces[name] = piece
            return piece

        return add

    def get(self, name: str, field: str | None = None) -> T:
        """The piece of that name, or the one at ``package.module:attribute``.

        Raises ConfigError where it cannot be imported, or, with the nearest known name, where there is none.
        """
        if ":" in name:
            return self._import(name, field or self.kind)
        if name not in self._pieces:
            raise ConfigError(
                f"unknown {self.kind}",
                field=field or self.kind,
                value=name,
                remedy=nearest(name, self._pieces),
            )
        return self._pieces[name]

    def _import(self, path: str, field: str) -> T:
        module, _, attribute = path.partition(":")
        try:
            piece: T = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"cannot be imported: {error}", field=field, value=path) from None
        return piece

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)
