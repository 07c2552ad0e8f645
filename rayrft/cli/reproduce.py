"""``rayrft reproduce``: a learning claim as a recipe, which is run from several seeds and compared with its band."""

from __future__ import annotations

import datetime
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field

from rayrft.cli import Overrides, Storage, changes, say
from rayrft.cli.follow import follow
from rayrft.config import load_config, read_config
from rayrft.config.base import Section, invalid, section_rule
from rayrft.config.load import read_mapping
from rayrft.core import launch
from rayrft.errors import ConfigError, NotReproduced, nearest
from rayrft.monitor.records import EvaluationRecord, read_records
from rayrft.monitor.report import format_table
from rayrft.registry import Registry

RECIPES = Path("jobs/recipes")
_RESULTS = "results.jsonl"

Figures = dict[str, float]
"""What a seed gave, by name."""

measures: Registry[Callable[[Path, int], Figures]] = Registry("measure")


class Recipe(Section):
    """A learning claim: what is run, and in which band the mean over the seeds must be.

    A figure of a run is an accuracy: ``STAGE greedy`` or ``STAGE sampled`` at the end of a stage, ``STAGE greedy best``
    of the stage's best evaluation, or ``STAGE greedy at 40`` after so many of its steps. ``A - B`` is a difference,
    ``A - B | C`` that from the larger of two.
    """

    about: str
    config: dict[str, Any] | str | None = None
    """The config of the run, or the path of its file beside the recipe."""
    controls: str | None = None
    """A file beside the recipe with stages to be put between the first stage and the others, which start from it."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Keys of the config to change."""
    measure: str | None = None
    """In place of a config: ``package.module:function`` of a folder and a seed, which returns the figures."""
    seeds: tuple[int, ...] = (0, 1, 2)
    bands: dict[str, tuple[float, float]]
    """Lowest and highest mean over the seeds, by figure."""
    source: str = ""
    """The public report from which the band is, of a recipe that was not run by this project."""
    gpu_hours: float | None = None
    """Of one seed."""

    @section_rule
    def _one_way(self) -> None:
        if (self.config is None) == (self.measure is None):
            raise invalid("config", "a recipe has either a config or a measure", "correct the recipe")


def reproduce(
    name: Annotated[str | None, typer.Argument(help="a recipe of jobs/recipes, or its file; none: list them")] = None,
    overrides: Overrides = None,
    seeds: Annotated[str, typer.Option(help="such as 0,1; those of the recipe by default")] = "",
    storage: Storage = Path("runs/reproduce"),
    record: Annotated[bool, typer.Option(help="add the figures to results.jsonl beside the recipe")] = False,
) -> None:
    """Run a recipe from its seeds; fail if a figure is outside its band. Without a name list recipes and releases."""
    if name is None:
        return _list(RECIPES)
    file = Path(name) if name.endswith(".yaml") else RECIPES / f"{name}.yaml"
    recipe = read_recipe(file)
    try:
        chosen = tuple(map(int, seeds.split(","))) if seeds else recipe.seeds
    except ValueError:
        raise ConfigError("must be whole numbers", "give them such as 0,1,2", field="--seeds", value=seeds) from None
    found = [_measure(recipe, file, seed, storage / file.stem, changes(overrides)) for seed in chosen]
    columns = {figure: [figure_of(each, figure) for each in found] for figure in recipe.bands}
    say("\n" + table(recipe, chosen, columns) + "\n")
    if record:
        _record(file, chosen, columns)
    outside = [_outside(figure, band, columns[figure]) for figure, band in recipe.bands.items()]
    if any(outside):
        remedy = "compare the runs with those of an earlier release: rayrft view " + str(storage / file.stem)
        raise NotReproduced("; ".join(filter(None, outside)), remedy, field=file.stem)
    say(f"{file.stem}: reproduced")


def read_recipe(file: Path) -> Recipe:
    """Read a recipe. Raises ConfigError, which names file and key, if there is none or it is invalid."""
    if not file.is_file():
        known = [path.stem for path in RECIPES.glob("*.yaml")]
        hint = nearest(file.stem, known) if known else "run the command in a checkout, which has jobs/recipes"
        raise ConfigError("there is no such recipe", hint, field="name", value=str(file))
    try:
        return read_config(Recipe, file)
    except ConfigError as error:
        where = " ".join(dict.fromkeys([str(file), error.field]))
        raise ConfigError(error.problem, error.remedy, field=where, value=error.value) from None


def figure_of(figures: Mapping[str, float], name: str) -> float:
    """Return a figure, or the difference that ``A - B | C`` names. Raises ConfigError for an unknown one."""
    first, _, less = name.partition(" - ")
    for each in (first, *filter(None, less.split(" | "))):
        if each not in figures:
            raise ConfigError("no such figure", nearest(each, figures), field="bands", value=each)
    return figures[first] - (max(figures[each] for each in less.split(" | ")) if less else 0.0)


def run_figures(folder: Path, metric: str = "accuracy") -> Figures:
    """Return the figures of a run, of this number of its evaluations."""
    figures = Figures()
    for record in read_records(folder):
        if isinstance(record, EvaluationRecord):
            name, value = f"{record.stage} {'sampled' if record.temperature else 'greedy'}", getattr(record, metric)
            best = max(value, figures.get(f"{name} best", value))
            figures |= {name: value, f"{name} best": best, f"{name} at {record.stage_step}": value}
    return figures


def table(recipe: Recipe, seeds: Sequence[int], columns: Mapping[str, Sequence[float]]) -> str:
    """Return the figures by seed, their means and bands, as text."""
    lines = [["", *(f"seed {seed}" for seed in seeds), "mean", "band", ""]]
    for name, values in columns.items():
        low, high = recipe.bands[name]
        verdict = "outside" if _outside(name, recipe.bands[name], values) else "in"
        numbers = [f"{value:.3f}" for value in (*values, sum(values) / len(values))]
        lines.append([name, *numbers, f"{low:g} to {high:g}", verdict])
    return format_table(lines)


def _outside(name: str, band: tuple[float, float], values: Sequence[float]) -> str:
    """Return why a figure does not agree with its band; empty if it does. NaN does not."""
    mean = sum(values) / len(values)
    return "" if band[0] <= mean <= band[1] else f"{name} is {mean:.3f} in the mean, not {band[0]:g} to {band[1]:g}"


def _measure(recipe: Recipe, file: Path, seed: int, storage: Path, changed: dict[str, Any]) -> Figures:
    """Run a recipe from a seed; return all its figures."""
    if recipe.measure is not None:
        if changed:
            remedy = "change the function that measures, or leave them out"
            raise ConfigError("the recipe has no config to change", remedy, field=next(iter(changed)))
        storage.mkdir(parents=True, exist_ok=True)
        measure = measures.get(recipe.measure, "measure")
        return measure(Path(tempfile.mkdtemp(prefix=f"{seed}-", dir=storage)), seed)
    raw = recipe.config
    if isinstance(raw, str):
        raw = read_mapping(file.parent / raw)
    assert raw is not None  # `read_recipe` refuses neither
    if recipe.controls is not None:
        first, *others = raw["stages"]
        controls = read_mapping(file.parent / recipe.controls)["stages"]
        raw["stages"] = [first, *controls, *({**each, "start_from": first["name"]} for each in others)]
    settings = {**recipe.set, "name": f"{file.stem}-{seed}", "storage": str(storage), "seed": seed, **changed}
    run = launch.start(load_config(raw, settings), say=say)
    follow(run)
    return run_figures(run.folder)


def _record(file: Path, seeds: Sequence[int], columns: Mapping[str, Sequence[float]]) -> None:
    figures = {name: [round(value, 4) for value in values] for name, values in columns.items()}
    about = {"recipe": file.stem, "release": metadata.version("rayrft"), "date": f"{datetime.date.today()}"}
    with (file.parent / _RESULTS).open("a") as results:
        results.write(json.dumps({**about, "seeds": list(seeds), "figures": figures}) + "\n")


def _list(folder: Path) -> None:
    """Print the recipes, and the means of their figures by release."""
    if not folder.is_dir():
        raise ConfigError("there is no such folder", "run the command in a checkout", field="jobs/recipes")
    recipes = {file.stem: read_recipe(file) for file in sorted(folder.glob("*.yaml"))}
    hours = {name: f"{each.gpu_hours:g} GPU hours a seed" if each.gpu_hours else "" for name, each in recipes.items()}
    about = [[name, each.about.split("\n")[0], hours[name], each.source] for name, each in recipes.items()]
    say(format_table([["recipe", "claim", "cost", "source of the band"], *about]) + "\n")
    file = folder / _RESULTS
    results = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    releases = list(dict.fromkeys(each["release"] for each in results))
    lines = [["", "band", *releases]]
    for name, recipe in recipes.items():
        for figure, (low, high) in recipe.bands.items():
            latest = {
                each["release"]: each["figures"][figure]
                for each in results
                if each["recipe"] == name and figure in each["figures"]
            }
            means = [f"{sum(latest[each]) / len(latest[each]):.3f}" if each in latest else "-" for each in releases]
            lines.append([f"{name}: {figure}", f"{low:g} to {high:g}", *means])
    say(format_table(lines))
