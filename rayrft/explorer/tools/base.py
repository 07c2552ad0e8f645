"""Tools: functions that a model may call, as their users write them, and as they are described to a model."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NotRequired

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_json
from typing_extensions import TypedDict

from rayrft.errors import ConfigError, first_line
from rayrft.registry import Registry

tools: Registry[Callable[..., Any]] = Registry("tool")
"""Name to a function, or to a class whose public methods are tools: every attempt has an object of its own."""
register_tool = tools.register

TOOLS = "explorer.workflow_options.tool_calling.tools"
"""The config key that errors name."""


@dataclass(frozen=True)
class Tool:
    """The description of a tool for a model. ``parameters`` is a JSON schema; ``check`` raises ValueError by it."""

    name: str
    description: str
    parameters: dict[str, Any]
    check: Callable[[dict[str, Any]], dict[str, Any]]
    """Take arguments as JSON has them, and return them as the function takes them."""

    @property
    def schema(self) -> dict[str, Any]:
        """The form in which chat templates take a tool."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def function_tool(name: str, function: Callable[..., Any], *, bound: bool = True) -> Tool:
    """Describe a function by its docstring, signature and type hints, of which ``Annotated[int, Field(description=…)]``
    says more of an argument. If it is not ``bound``, its first parameter is ``self``.

    Raises ConfigError if it cannot be called by names, or a type has no JSON schema.
    """
    adapter = _arguments(name, function, bound)
    try:
        parameters = adapter.json_schema(schema_generator=_Untitled)
    except PydanticUserError as error:
        raise _unfit(name, f"has a parameter without a JSON schema: {first_line(error)}") from None
    parameters.pop("title", None)
    parameters.pop("additionalProperties", None)

    def check(arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            return adapter.validate_json(to_json(arguments), strict=True)
        except ValidationError as error:
            found = [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors(include_url=False)]
            raise ValueError("; ".join(f"{where}: {problem}" for where, problem in found)) from None

    return Tool(name, inspect.getdoc(function) or "", parameters, check)


def methods(kind: type) -> dict[str, Callable[..., Any]]:
    """Return the public methods of a class by name, but for ``close``, which ends an object."""
    found = inspect.getmembers(kind, inspect.isfunction)
    return {name: method for name, method in found if not name.startswith("_") and name != "close"}


def find_tool(name: str) -> tuple[str, Callable[..., Any]]:
    """Return a registered tool, or the one at ``package.module:attribute``, and what a model calls it by.

    Raises ConfigError if there is none.
    """
    return name.rpartition(":")[2], tools.get(name, TOOLS)


def shortened(value: Any, limit: int) -> str:
    """Write a result as text, or JSON if it is not a text, cut after ``limit`` characters."""
    text = value
    if not isinstance(value, str):
        text = to_json(value, fallback=str, bytes_mode="base64", inf_nan_mode="constants").decode()
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[the first {limit:,} of {len(text):,} characters]"


class ToolHost:
    """Tools in a process of their own: functions, or objects of classes with tools as methods. ``named`` are names of
    tools with the options of a class."""

    def __init__(self, named: dict[str, dict[str, Any]]) -> None:
        self._objects: list[Any] = []
        self._tools: dict[str, tuple[Tool, Callable[..., Any]]] = {}
        for path, options in named.items():
            name, piece = find_tool(path)
            if not inspect.isclass(piece):
                self._tools[name] = function_tool(name, piece), piece
                continue
            self._objects.append(piece(**options))
            for method in methods(piece):
                bound = getattr(self._objects[-1], method)
                self._tools[method] = function_tool(method, bound), bound

    def call(self, name: str, arguments: dict[str, Any], limit: int) -> str:
        """Call a tool; return its result as text of at most ``limit`` characters and a note."""
        tool, function = self._tools[name]
        return shortened(function(**tool.check(arguments)), limit)

    def close(self) -> None:
        """Close the objects that have a ``close``."""
        for each in self._objects:
            if hasattr(each, "close"):
                each.close()


def _arguments(name: str, function: Callable[..., Any], bound: bool) -> TypeAdapter[dict[str, Any]]:
    """Return a validator of a function's arguments, given as a dictionary."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise _unfit(name, f"has a type hint that is not known where it is defined: {error}") from None
    fields: dict[str, Any] = {}
    for parameter in list(inspect.signature(function).parameters.values())[0 if bound else 1 :]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise _unfit(name, f"has the parameter {parameter}, which cannot be given by name")
        hint = hints.get(parameter.name, Any)
        fields[parameter.name] = hint if parameter.default is parameter.empty else NotRequired[hint]
    shape = with_config(ConfigDict(extra="forbid"))(TypedDict(name, fields))  # type: ignore[operator]
    try:
        return TypeAdapter(shape)
    except PydanticUserError as error:
        raise _unfit(name, f"has a parameter that cannot be checked: {first_line(error)}") from None


def _unfit(name: str, problem: str) -> ConfigError:
    remedy = "give it parameters with names, of types that JSON has"
    return ConfigError(f"the tool {problem}", remedy, field=TOOLS, value=name)


class _Untitled(GenerateJsonSchema):
    """A title repeats the name, in tokens of every prompt."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False
