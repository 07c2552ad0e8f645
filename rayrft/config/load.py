"""Loading of YAML and overrides to a validated config, of a run or of another class."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import re
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from rayrft.config.base import REFERENCE
from rayrft.config.run import FolderConfig, RunConfig
from rayrft.errors import ConfigError, nearest
from rayrft.files import local_path, read_text
from rayrft.registry import load_plugins, loaded_plugins

Loaded = TypeVar("Loaded", bound=BaseModel)
_Source = str | Path | dict[str, Any]

TRUST = "RAYRFT_TRUST_PLUGINS"
"""The environment variable that lets readers of a run folder run its plug-ins."""
_SECRET_KEY = re.compile(
    r"(?i:(?!(pad|eos|bos|unk|sep|cls|mask|stop|image|special)_)(.*_)?"
    r"((api|access|private|auth)_?key|token|secret|passw(or)?d|credentials?)$)|.*[A-Z]_KEY$"
)
_SECRET = re.compile(
    r"\b(hf_[A-Za-z0-9]{20}|sk-[\w-]{20}|gh[a-z]_[A-Za-z0-9]{20}|github_pat_\w{20}|glpat-[\w-]{20}|AKIA[A-Z0-9]{16})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY|://[^/\s:@]*:[^/\s@]+@|[?&]\w*(?i:key|token|secret|signature)=[^&\s]{8}"
)


class _Loader(yaml.SafeLoader):
    """Parses 1e-4 as a number, as YAML 1.2 does; PyYAML follows 1.1, where it is text. Refuses a key that a mapping has
    twice, of which PyYAML takes the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first = {key.value: key for key, _ in reversed(node.value) if isinstance(key, yaml.ScalarNode)}
        for key, _ in node.value:
            if first.get(str(key.value), key) is not key:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would parse as a number."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), [*"+-.0123456789"]
    )


def load_config(source: _Source | RunConfig, overrides: dict[str, Any] | None = None) -> RunConfig:
    """Read the config of a run and apply overrides; see `read_config`."""
    return read_config(RunConfig, source, overrides)


def read_config(model: type[Loaded], source: _Source | Loaded, overrides: dict[str, Any] | None = None) -> Loaded:
    """Read a config of a class and apply overrides.

    source: a YAML file, a dictionary, or a config. overrides: dotted key to value; a number in the key selects from a
    list (``stages.0.steps``), as does the name of an entry (``stages.mix.steps``).

    Its ``plugins`` are loaded into this process. Raises ConfigError, with field, value and remedy, on any problem.
    """
    raw = _read(source)
    for key, value in (overrides or {}).items():
        _assign(raw, key, value)
    _refuse_secrets(raw, [], raw)
    # Plugins first: validation looks up their names. Anything but a list of paths is left to it.
    if isinstance(paths := raw.get("plugins"), list) and all(isinstance(path, str) for path in paths):
        load_plugins(local_path(path, "plugins").expanduser().absolute() for path in paths)
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise explain(error, raw, model) from None


def load_run_config(folder: Path, overrides: dict[str, Any] | None = None, *, trusted: bool = False) -> RunConfig:
    """Read the config of a run folder and apply overrides.

    Unless it is ``trusted``, somebody else may have made it: its plug-ins are not run, unless this process has loaded
    them before, or its environment has RAYRFT_TRUST_PLUGINS=1.

    Raises ConfigError, also if the config is not valid without its plug-ins.
    """
    return _load(RunConfig, folder, _read(folder / "config.yaml"), overrides, trusted)


def load_folder_config(folder: Path) -> FolderConfig:
    """Read the keys of a run folder's config that its readers need, as `load_run_config` does."""
    raw = _read(folder / "config.yaml")
    return _load(FolderConfig, folder, {name: raw[name] for name in FolderConfig.model_fields if name in raw})


def _load(
    model: type[Loaded], folder: Path, raw: dict[str, Any], overrides: Any = None, trusted: bool = False
) -> Loaded:
    plugins = [Path(str(path)) for path in raw.get("plugins") or ()]
    if trusted or os.environ.get(TRUST) == "1" or set(plugins) <= set(loaded_plugins()):
        try:
            return read_config(model, raw, overrides)
        except ConfigError as error:
            if error.problem != "unknown key":
                raise
            if overrides:
                _load(model, folder, raw, trusted=trusted)  # raises if it is the file that has the key
                raise
            problem, remedy = "unknown key: another version of rayrft wrote it", "use the version that wrote it"
            raise ConfigError(problem, remedy, field=error.field, value=error.value) from None
    remedy = f"read {', '.join(map(str, plugins))}; if you trust that code, set {TRUST}=1 to run it"
    logging.getLogger(__name__).warning("plug-ins of the run folder %s are not run: %s", folder, remedy)
    try:
        return read_config(model, {**raw, "plugins": []}, overrides)
    except ConfigError as error:
        problem = f"{error.problem}, and readers of a run folder do not run its plug-ins"
        raise ConfigError(problem, remedy, field=error.field, value=error.value) from None


def _refuse_secrets(value: Any, path: list[str], raw: Any) -> None:
    """Raise ConfigError for a text that looks like a secret: the config is written to files, logs and wandb."""
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        _refuse_secrets(each, [*path, str(key)], raw)
    if not isinstance(value, str):
        return
    field = ".".join(_named(path, raw))
    if REFERENCE.fullmatch(value):
        if {"options", "workflow_options", "url"}.isdisjoint(path):
            remedy = "give the value itself; only options and urls take env:NAME"
            raise ConfigError("cannot be a reference to a variable", remedy, field=field, value=value)
        return
    named = path and _SECRET_KEY.match(path[-1]) and re.fullmatch(r"[^\s<>]{8,}", value)
    if named or _SECRET.search(value):
        problem = "looks like a secret, and a config is written to the run's folder, to logs and to wandb"
        raise ConfigError(problem, "put it into an environment variable and give env:NAME", field=field)


def parse_override(text: str) -> tuple[str, Any]:
    """Parse ``key.sub=value``, the value as YAML. Raises ConfigError if there is no '='."""
    key, mark, value = text.partition("=")
    if not mark or not key:
        raise ConfigError("must have the form key.sub=value", "add '=' and a value", field="override", value=text)
    return key.strip(), _parse(value, key, "correct it")


def dump_config(config: RunConfig) -> str:
    """Dump the complete config as YAML, including defaults."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


def _read(source: _Source | BaseModel) -> dict[str, Any]:
    if isinstance(source, BaseModel):
        return source.model_dump(mode="json")
    if isinstance(source, dict):
        return copy.deepcopy(source)
    raw = read_mapping(path := Path(source))
    plugins = raw["plugins"] if isinstance(raw.get("plugins"), list) else []
    for number, plugin in enumerate(plugins):
        copies = [*(path.parent / "plugins").glob(f"{number}-*")]
        if copies and not Path(str(plugin)).exists():
            plugins[number] = str(copies[0])
    return raw


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises ConfigError if it has none."""
    raw = _parse(read_text(path, "config"), str(path), "fix the file at that line")
    if not isinstance(raw, dict):
        raise ConfigError("must be a mapping", "write 'key: value'", field=str(path), value=type(raw).__name__)
    return raw


def _parse(text: str, field: str, remedy: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"is not valid YAML: {error}", remedy, field=field) from None


def plugin_copy(folder: Path, number: int, path: Path) -> Path:
    """Return the path of a run's copy of a plug-in, named by its place in ``plugins`` and a digest."""
    if path.parent == folder:
        return path
    return folder / f"{number}-{hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()}-{path.name}"


def _assign(raw: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    node: Any = raw
    for part in parents:
        node = _entry(node, part, dotted) if isinstance(node, list) else node.setdefault(part, {})
        if not isinstance(node, dict | list):
            remedy = "override the value itself, without a key after its name"
            raise ConfigError(f"cannot be set: {part!r} is a value, not a section", remedy, field=dotted, value=node)
    if isinstance(node, list):
        remedy = "add a field of the entry, such as stages.mix.steps"
        raise ConfigError("cannot replace a whole list entry", remedy, field=dotted)
    node[last] = value


def _entry(entries: list[Any], part: str, dotted: str) -> Any:
    if part.isdigit() and int(part) < len(entries):
        return entries[int(part)]
    named = {str(entry.get("name") or number): entry for number, entry in enumerate(entries) if isinstance(entry, dict)}
    if part not in named:
        raise ConfigError("names an entry that does not exist", nearest(part, named), field=dotted, value=part)
    return named[part]


def explain(error: ValidationError, raw: dict[str, Any], model: type[BaseModel]) -> ConfigError:
    """Convert the first problem to a ConfigError. An unknown key beside a missing one is taken for its misspelling."""
    first, *others = error.errors()
    beside = [each for each in others if each["type"] == "extra_forbidden" and each["loc"][:-1] == first["loc"][:-1]]
    problem = beside[0] if beside and first["type"] == "missing" else first
    path, kind = [str(part) for part in problem["loc"]], problem["type"]
    field = ".".join(_named(path, raw))
    if kind == "extra_forbidden":
        known = _section_at(model, path[:-1]).model_fields
        remedy = nearest(path[-1], known) if known else "leave it out: nothing can be set here"
        return ConfigError("unknown key", remedy, field=field, value=path[-1])
    if kind == "missing":
        return ConfigError("a required key is missing", f"add '{field}: …'", field=field)
    reason = problem.get("ctx", {}).get("error")
    if isinstance(reason, ValueError) and isinstance(cause := reason.args[0], ConfigError):
        at = ".".join(filter(None, (field, cause.field)))
        return ConfigError(cause.problem, cause.remedy, field=at, value=cause.value)
    message = problem["msg"].removeprefix("Value error, ")
    given = problem["input"]
    value = None if isinstance(given, dict | BaseModel) else str(given) if isinstance(given, Path) else given
    keys = getattr(_section_at(model, path[:-1]), "model_fields", {})  # none of a list of numbers
    limit = keys.get(path[-1]) if kind.startswith("greater_than") else None
    optional = limit is not None and type(None) in typing.get_args(limit.annotation)
    remedy = "give null for none, or for the default" if optional else ""
    return ConfigError(message, remedy, field=field or "config", value=value)


def _named(path: list[str], raw: Any) -> list[str]:
    """Replace the numbers of list entries in a path of keys by their names, as in an override."""
    named = []
    for part in path:
        if isinstance(raw, list) and part.isdigit() and int(part) < len(raw):
            raw = raw[int(part)]
            named.append(str(raw.get("name") or part) if isinstance(raw, dict) else part)
        else:
            raw = raw.get(part) if isinstance(raw, dict) else None
            named.append(part)
    return named


def _section_at(model: type[BaseModel], path: list[str]) -> type[BaseModel]:
    section: Any = model
    for part in path:
        if isinstance(section, type) and issubclass(section, BaseModel) and part in section.model_fields:
            section = _section_in(section.model_fields[part].annotation)
    return section


def _section_in(annotation: Any) -> Any:
    """Return the section class inside an annotation such as ``list[StageConfig]`` or ``TinyModelConfig | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    sections = [_section_in(argument) for argument in typing.get_args(annotation)]
    return next((section for section in sections if section is not None), None)
