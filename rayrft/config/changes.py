"""Changes of a config while its run is running: which keys may change, and to which values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from rayrft.config.base import CHANGEABLE, Section
from rayrft.config.load import load_config
from rayrft.config.run import RunConfig
from rayrft.config.stage import AlgorithmConfig
from rayrft.errors import ConfigError

_RESUME = "stop the run, and resume it with the key"


def changeable(config: RunConfig) -> dict[str, Any]:
    """Return the keys that may change while the run is running, with their values. Of an algorithm these are its
    numbers, defaults included, without initial values of coefficients that adapt."""
    kept = ["explorer.sampling.temperature"] if config.endpoint is not None else []  # applications see one
    kept += ["buffer."] if config.buffer.name is not None else []  # which its jobs share
    kept += ["reward.parts.", "reward.domains."] if config.reward.placement != "beside" else []  # other actors add up
    walked = _walk(config, "")
    return {key: value for key, value, may_change in walked if may_change and not key.startswith(tuple(kept))}


def change_config(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Return a running run's config with other values, by key. Raises ConfigError if a key cannot change while the run
    is running, and the errors of `load_config`."""
    new = load_config(config, dict(changes))
    before, after = ({key: value for key, value, _ in _walk(each, "")} for each in (config, new))
    may_change = changeable(config).keys() & changeable(new).keys()
    for key in (key for key in before | after if before.get(key) != after.get(key) and key not in may_change):
        patterns = sorted({re.sub(r"^(stages)\.[^.]+|(algorithm)\..+", r"\1\2.*", each) for each in may_change})
        problem, remedy = "cannot change while the run is running", f"{_RESUME}; these can: {', '.join(patterns)}"
        raise ConfigError(problem, remedy, field=key, value=after.get(key))
    samplers = [each.buffer.sampler.name for each in (config, new)]
    if samplers[0] != samplers[1] and {*samplers} != {"uniform", "priority"}:
        problem = "only uniform and priority can be exchanged while the run is running"
        raise ConfigError(problem, _RESUME, field="buffer.sampler.name", value=samplers[1])
    if new.evaluation.enabled and not config.evaluation.enabled:
        raise ConfigError("can only be disabled while the run is running", _RESUME, field="evaluation.enabled")
    for old, stage in zip(config.stages, new.stages, strict=True):
        one, other, field = old.algorithm.build(), stage.algorithm.build(), f"stages.{stage.name}.algorithm"
        if terms := sorted(one.needs.keys() ^ other.needs.keys() or one.terms ^ other.terms):
            remedy = f"give a small number instead of 0; or {_RESUME}"
            raise ConfigError("would add or remove a term of the loss", remedy, field=field, value=terms)
    return new


def _walk(section: Section, path: str) -> Iterator[tuple[str, Any, bool]]:
    """Iterate over the keys of a section, whose path ends with a dot, with their values and whether they may change."""
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{path}{name}"
        if isinstance(value, AlgorithmConfig):
            pieces = _pieces(value)
            adapt = {"kl_coef": pieces["kl_target"], "entropy_coef": pieces["entropy_goal"]}
            for entry, each in pieces.items():
                yield f"{key}.{entry}", each, type(each) in (int, float) and adapt.get(entry) is None
        elif isinstance(value, Section):
            yield from _walk(value, f"{key}.")
        elif isinstance(value, list | dict) and any(isinstance(each, Section) for each in _named(value).values()):
            for entry, each in _named(value).items():
                yield from _walk(each, f"{key}.{entry}.")
        else:
            yield key, [*value] if isinstance(value, tuple) else value, CHANGEABLE in field.metadata


def _named(entries: list[Any] | dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a list by name, or by number if a name is missing or not unique."""
    if isinstance(entries, dict):
        return entries
    names = [getattr(entry, "name", None) for entry in entries]
    keys = [str(n) if name is None or names.count(name) > 1 else name for n, name in enumerate(names)]
    return dict(zip(keys, entries, strict=True))


def _pieces(config: AlgorithmConfig) -> dict[str, Any]:
    """Return the pieces and coefficients of an algorithm."""
    from rayrft.algorithms.registries import REGISTRIES

    algorithm, found = config.build(), dict[str, Any]()
    for kind in REGISTRIES:
        for piece in algorithm.pieces(kind):
            found |= piece.coefficients
    found |= {field.name: getattr(algorithm, field.name) for field in fields(algorithm) if field.name != "coefficients"}
    return found | dict(algorithm.coefficients)
