"""From YAML and overrides to a checked :class:`RunConfig`."""

from __future__ import annotations

import copy
import re
import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from rayrft.config.run import RunConfig
from rayrft.errors import ConfigError, nearest
from rayrft.registry import load_plugins


class _Loader(yaml.SafeLoader):
    """Takes 1e-4 for a number, as YAML 1.2 does; PyYAML follows 1.1, where it is text."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would take for a number."""


for _each in (_Loader, _Dumper):
    _each.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), [*"+-.0123456789"]
    )


def load_config(source: str | Path | dict[str, Any] | RunConfig, overrides: dict[str, Any] | None = None) -> RunConfig:
    """Read a config and apply overrides.

    source: a YAML file, a dictionary, or a config. overrides: dotted key to value; a number in the key picks from a
    list (``stages.0.steps``), and so does the name of an entry (``stages.mix.steps``).

    Its ``plugins`` are loaded into this process. Raises ConfigError, with the field, its value and the remedy, on
    anything that is wrong with it.
    """
    raw = _read(source)
    for key, value in (overrides or {}).items():
        _assign(raw, key, value)
    _load_plugins(raw.get("plugins"))
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        raise _explain(error, raw) from None


def parse_override(text: str) -> tuple[str, Any]:
    """``key.sub=value`` with the value read as YAML; raises ConfigError where there is no '='."""
    key, mark, value = text.partition("=")
    if not mark or not key:
        raise ConfigError("an override is written key.sub=value", field="override", value=text)
    return key.strip(), yaml.load(value, _Loader)


def dump_config(config: RunConfig) -> str:
    """The complete config as YAML, defaults included."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


def _load_plugins(paths: Any) -> None:
    """Before validation, which looks up what they register. Anything but a list of paths is left to validation."""
    if isinstance(paths, list) and all(isinstance(path, str) for path in paths):
        load_plugins(Path(path).expanduser().absolute() for path in paths)


def _read(source: str | Path | dict[str, Any] | RunConfig) -> dict[str, Any]:
    if isinstance(source, RunConfig):
        return source.model_dump(mode="json")
    if isinstance(source, dict):
        return copy.deepcopy(source)
    path = Path(source)
    if not path.is_file():
        raise ConfigError("no such config file", field="config", value=str(source), remedy="give a YAML file")
    try:
        raw = yaml.load(path.read_text(), _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {error}", field=str(path), remedy="mend the file at that line") from None
    if not isinstance(raw, dict):
        raise ConfigError("a config is a mapping of sections", field=str(path), value=type(raw).__name__)
    return raw


def _assign(raw: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    node: Any = raw
    for part in parents:
        node = _entry(node, part, dotted) if isinstance(node, list) else node.setdefault(part, {})
        if not isinstance(node, dict | list):
            raise ConfigError(
                f"{part!r} is a value, not a section",
                field=dotted,
                value=node,
                remedy="give the value itself, without what follows its name",
            )
    if isinstance(node, list):
        raise ConfigError(
            "an override changes a value, not a whole list entry",
            field=dotted,
            remedy="add the name of a field of the entry, such as stages.mix.steps",
        )
    node[last] = value


def _entry(entries: list[Any], part: str, dotted: str) -> Any:
    if part.isdigit() and int(part) < len(entries):
        return entries[int(part)]
    named = {str(entry.get("name") or number): entry for number, entry in enumerate(entries) if isinstance(entry, dict)}
    if part not in named:
        raise ConfigError("no such entry", field=dotted, value=part, remedy=nearest(part, named))
    return named[part]


def _explain(error: ValidationError, raw: dict[str, Any]) -> ConfigError:
    """One error for the first problem: the rest often follows from it."""
    problem = error.errors()[0]
    path, kind = [str(part) for part in problem["loc"]], problem["type"]
    field = ".".join(_named(path, raw))
    if kind == "extra_forbidden":
        known = _fields_at(path[:-1])
        return ConfigError("unknown key", field=field, value=path[-1], remedy=nearest(path[-1], known))
    if kind == "missing":
        return ConfigError("a required key is missing", field=field, remedy=f"add '{field}: …'")
    reason = problem.get("ctx", {}).get("error")
    if isinstance(reason, ValueError) and isinstance(misfit := reason.args[0], ConfigError):
        at = ".".join(filter(None, (field, misfit.field)))
        return ConfigError(misfit.problem, field=at, value=misfit.value, remedy=misfit.remedy)
    message = problem["msg"].removeprefix("Value error, ")
    value = None if isinstance(problem["input"], dict | BaseModel) else problem["input"]
    return ConfigError(message, field=field or "config", value=value)


def _named(path: list[str], raw: Any) -> list[str]:
    """A path of keys, with the names of list entries in place of their numbers, as an override gives it."""
    named = []
    for part in path:
        if isinstance(raw, list) and part.isdigit() and int(part) < len(raw):
            raw = raw[int(part)]
            named.append(str(raw.get("name") or part) if isinstance(raw, dict) else part)
        else:
            raw = raw.get(part) if isinstance(raw, dict) else None
            named.append(part)
    return named


def _fields_at(path: list[str]) -> list[str]:
    """Names of the fields of the section at a path of keys."""
    section: Any = RunConfig
    for part in path:
        if isinstance(section, type) and issubclass(section, BaseModel) and part in section.model_fields:
            section = _section_in(section.model_fields[part].annotation)
    return list(section.model_fields)


def _section_in(annotation: Any) -> Any:
    """The section class inside an annotation such as ``list[StageConfig]`` or ``TinyModelConfig | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = [_section_in(argument) for argument in typing.get_args(annotation)]
    return next((each for each in found if each is not None), None)
