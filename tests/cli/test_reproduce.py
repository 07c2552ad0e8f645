"""`rayrft reproduce`: figures of runs, bands, what is outside them, and releases side by side."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rayrft.cli.main import app
from rayrft.cli.reproduce import figure_of, measures, read_recipe, run_figures
from rayrft.config import load_config
from rayrft.errors import ConfigError, NotReproduced
from rayrft.monitor.records import RecordFile
from tests.conftest import ROOT
from tests.monitor.made import evaluation

RECIPES = {file.stem: file for file in sorted((ROOT / "jobs" / "recipes").glob("*.yaml"))}
GAINS = {0: 0.3, 1: 0.5, 2: math.nan}


def gains(folder: Path, seed: int) -> dict[str, float]:
    assert folder.is_dir()
    return {"after": 0.4 + GAINS[seed], "before": 0.4, "other": 0.45}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkout with recipes alone, in which commands are run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs" / "recipes").mkdir(parents=True)
    yield tmp_path / "jobs" / "recipes"


def write(folder: Path, name: str = "gain", **more: Any) -> None:
    bands = {"after": [0.7, 0.9], "after - before | other": [0.3, 0.4]}
    recipe = {"about": "A gain", "measure": "tests.cli.test_reproduce:gains", "seeds": [0, 1], "bands": bands, **more}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe))


def reproduce(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["reproduce", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_figures_in_their_bands_are_reproduced_and_recorded_by_release(checkout: Path) -> None:
    write(checkout)
    output = reproduce("gain", "--record")
    assert re.search(r"after\s+0.700\s+0.900\s+0.800\s+0.7 to 0.9\s+in", output) and "gain: reproduced" in output
    assert re.search(r"after - before \| other\s+0.250\s+0.450\s+0.350\s+0.3 to 0.4\s+in", output)
    [recorded] = [json.loads(line) for line in (checkout / "results.jsonl").read_text().splitlines()]
    assert recorded["seeds"] == [0, 1] and recorded["figures"]["after"] == [0.7, 0.9]
    later = {**recorded, "release": "9.0", "figures": {"after": [0.6, 0.6]}}
    with (checkout / "results.jsonl").open("a") as results:
        results.write(json.dumps(later) + "\n")
    write(checkout, "large", source="https://example.org/table", gpu_hours=2)
    listed = reproduce()
    assert re.search(r"large\s+A gain\s+2 GPU hours a seed\s+https://example.org/table\n", listed)
    assert "A gain" in listed and re.search(rf"band\s+{re.escape(recorded['release'])}\s+9.0", listed)
    assert re.search(r"gain: after\s+0.7 to 0.9\s+0.800\s+0.600\n", listed)
    assert re.search(r"gain: after - before \| other\s+0.3 to 0.4\s+0.350\s+-", listed)


@pytest.mark.parametrize(("seeds", "outside"), [("0", "0.700"), ("1", None), ("0,2", "nan")])
def test_a_figure_outside_its_band_fails_by_name(seeds: str, outside: str | None, checkout: Path) -> None:
    write(checkout, bands={"after": [0.75, 0.95], "before": [0.4, 0.4]})
    if outside is None:
        reproduce("gain", "--seeds", seeds)
        return
    with pytest.raises(NotReproduced, match=f"after is {outside} in the mean, not 0.75 to 0.95") as caught:
        reproduce("gain", "--seeds", seeds)
    assert "before" not in str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "arguments", "problem"),
    [
        ({}, ["gian"], "did you mean 'gain'"),
        ({}, ["gain", "--seeds", "one"], "must be whole numbers"),
        ({}, ["gain", "stages.grpo.steps=2"], "no config to change"),
        ({"config": {}}, ["gain"], "gain.yaml config: a recipe has either a config or a measure"),
        ({"band": {}}, [], "gain.yaml band: unknown key"),
        ({"bands": {"afer": [0, 1]}}, ["gain"], "did you mean 'after'"),
        ({"measure": "tests.cli.none:gains"}, ["gain"], "cannot be imported"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_named(
    recipe: dict[str, Any], arguments: list[str], problem: str, checkout: Path
) -> None:
    write(checkout, **recipe)
    with pytest.raises(ConfigError) as caught:
        reproduce(*arguments)
    assert problem.lower() in str(caught.value).lower()


def test_figures_of_a_run_are_those_of_its_evaluations(tmp_path: Path) -> None:
    records = RecordFile(tmp_path)
    for step, right in ((0, 10), (40, 90), (60, 80)):
        records.append(evaluation("grpo", step, right))
        records.append(evaluation("grpo", step, right // 2, temperature=1.0))
    records.close()
    figures = run_figures(tmp_path)
    assert figures["grpo greedy"] == 0.8 and figures["grpo greedy best"] == 0.9 and figures["grpo greedy at 0"] == 0.1
    assert figures["grpo sampled"] == 0.4
    assert figure_of(figures, "grpo greedy - grpo greedy at 0") == pytest.approx(0.7)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_can_be_run_and_has_the_figures_of_its_bands(name: str, tmp_path: Path) -> None:
    recipe = read_recipe(RECIPES[name])
    assert all(low < high for low, high in recipe.bands.values())
    assert (recipe.gpu_hours is None) == (not recipe.source), "a recipe that was not run has the source of its band"
    if recipe.measure is not None:
        assert callable(measures.get(recipe.measure))
        return
    raw = recipe.config
    if isinstance(raw, str):
        raw = yaml.safe_load((RECIPES[name].parent / raw).read_text())
    assert raw is not None
    settings = {**recipe.set, "storage": str(tmp_path), "plugins": []}  # what they register would stay in this process
    config = load_config(raw, settings)
    stages = [stage.name for stage in config.stages]
    if recipe.controls is not None:
        stages += [
            each["name"] for each in yaml.safe_load((RECIPES[name].parent / recipe.controls).read_text())["stages"]
        ]
    figures = {f"{stage} {how}": 0.5 for stage in stages for how in ("greedy", "sampled", "greedy best", "greedy at 0")}
    for figure in recipe.bands:
        figure_of(figures, figure)


def test_every_learning_claim_has_a_recipe() -> None:
    claims = set(re.findall(r"tests\.(?:bench\.lessons|trainer)\.(\w+)", (ROOT / "tests/bench/README.md").read_text()))
    claimed = {
        recipe.measure.split(":")[0].rpartition(".")[2]
        for recipe in map(read_recipe, RECIPES.values())
        if recipe.measure
    }
    assert claims == claimed


def test_every_mode_that_was_measured_has_a_recipe_whose_bands_hold_its_figures() -> None:
    recipes = {}
    for recipe in map(read_recipe, RECIPES.values()):
        if recipe.config == "../quickstart.yaml":
            partial = recipe.set.get("explorer.partial", {})
            recipes[recipe.set.get("max_staleness", 0), partial.get("budget"), partial.get("old_tokens")] = recipe
    table = (ROOT / "tests/bench/README.md").read_text().partition("## Asynchronous modes")[2].partition("\n\nAsync")[0]
    modes = [line for line in table.splitlines() if re.search(r"\.\d+, \.\d+", line)]
    assert len(modes) == 8
    for line in modes:
        old, budget, tokens = (re.search(f"{name}[=: ]+(\\w+)", line) for name in ("staleness", "budget", "old_tokens"))
        recipe = recipes[int(old[1]) if old else 0, int(budget[1]) if budget else None, tokens and tokens[1]]
        figures = [[*map(float, pair)] for pair in re.findall(r"(\.\d+), (\.\d+)", line)]
        assert len(figures) == len(recipe.seeds), line
        for name, values in zip(("mix greedy", "mix sampled"), zip(*figures, strict=True), strict=True):
            low, high = recipe.bands[name]
            assert low <= sum(values) / len(values) <= high, line
