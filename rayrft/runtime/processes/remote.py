"""Handles, in a process, to objects of its parent: methods are those of the class that has them, all or single ones.

>>> class RemoteModel(Remote, of=Model, attributes="max_length"):  # doctest: +SKIP
...     chat = remote_method(ChatModel.chat)

The parent answers with `call_object`, in the ``serve`` of a `Worker.call`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from rayrft.runtime.processes import template

P = ParamSpec("P")
R = TypeVar("R")

raised = dict[Exception, int]()
"""The errors that handles of this process have raised, with the parent's numbers for them."""


@dataclass(frozen=True)
class ErrorReply:
    """The reply to a call that raised: the error is raised in the process."""

    error: Exception
    number: int | None = None


class Remote:
    """A handle to the object that the parent knows by ``key``.

    A subclass ``of`` a class has its public methods and properties, ``without`` some, and ``attributes`` of objects.
    """

    _of: type

    def __init_subclass__(cls, of: type = object, attributes: str = "", without: str = "") -> None:
        cls._of = of
        members = {name: member for name, member in vars(of).items() if name[0] != "_" and name not in without.split()}
        for name, member in {**dict.fromkeys(attributes.split()), **members}.items():
            setattr(cls, name, remote_method(member) if callable(member) else remote_attribute(name))

    def __init__(self, key: Any) -> None:
        self.key = key


def remote_method(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return a method for a `Remote` that calls this method of the parent's object, with the same signature."""
    name = method.__name__

    async def call_async(self: Remote, *arguments: Any, **named: Any) -> Any:
        return _value(await template.parent.ask_async(self.key, name, arguments, named))

    def call(self: Remote, *arguments: Any, **named: Any) -> Any:
        return _value(template.parent.ask(self.key, name, arguments, named))

    return wraps(method)(call_async if inspect.iscoroutinefunction(method) else call)  # type: ignore[return-value]


def remote_attribute(name: str) -> Any:
    """Return a property for a `Remote`: the attribute of the parent's object."""
    return property(lambda self: _value(template.parent.ask(self.key, name, (), {})))


async def call_object(target: Any, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Call a method of the object of a handle, or read its attribute, in the parent; return the value."""
    found = getattr(target, name)
    returned = found(*arguments, **named) if callable(found) else found
    return await returned if inspect.isawaitable(returned) else returned


def _value(reply: Any) -> Any:
    if isinstance(reply, ErrorReply):
        if reply.number is not None:
            raised[reply.error] = reply.number
        raise reply.error
    return reply
