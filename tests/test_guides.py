"""What the guides promise: keys, names, messages, files and links that exist."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import typing
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, TypeAdapter

from rayrft.algorithms import Algorithm, presets
from rayrft.algorithms.registries import REGISTRIES
from rayrft.config import RunConfig, load_config
from rayrft.config.stage import AlgorithmConfig, StageConfig
from rayrft.explorer.workflows.base import workflows
from rayrft.rewards.base import rewards
from rayrft.viewer.advisories import CHECKS
from tests.config.given import base
from tests.conftest import ROOT

CONFIG, CORE, TRAINER = (ROOT / "rayrft" / room / "README.md" for room in ("config", "core", "trainer"))
CLUSTER, TESTS = ROOT / "cluster" / "README.md", ROOT / "tests" / "README.md"
GUIDES = [CONFIG, CORE, TRAINER, CLUSTER, TESTS]
SPAN = re.compile(r"`([^`]+)`")
KEY = re.compile(r"[a-z_]+(?:\[\]|\.<\w+>)?(?:\.(?:\w+|<\w+>)(?:\[\])?)*")


def section(page: Path, title: str) -> str:
    """The text below a heading, up to the next of the same level."""
    level, _, name = title.partition(" ")
    [_, text] = re.split(rf"^{level} {re.escape(name)}$", page.read_text(), flags=re.MULTILINE)
    return re.split(rf"^{level} ", text, flags=re.MULTILINE)[0]


def tables(text: str) -> Iterator[list[list[str]]]:
    """The tables of a text, as rows of cells with the header first."""
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in block.splitlines()]
        yield [rows[0], *rows[2:]]


def inside(annotation: Any, kind: type) -> Any:
    """The type inside a list or mapping, or the section that an annotation names; None without one."""
    for each in (annotation, *typing.get_args(annotation)):
        if inspect.isclass(each) and issubclass(each, BaseModel) and kind is BaseModel:
            return each
        if typing.get_origin(each) is kind:
            return typing.get_args(each)[-1]
    return None


@cache
def coefficients() -> set[str]:
    pieces = [registry.get(name) for registries in REGISTRIES.values() for registry in registries for name in registry]
    return {key for piece in pieces for key in piece.coefficients}


def check(span: str) -> None:
    """Check that a key exists, and with ``key: value`` that it takes the value."""
    key, _, value = span.partition(": ")
    at: Any = RunConfig
    for part in re.sub(r"\[\]", ".0", key).split("."):
        if (entry := inside(at, dict)) is not None or (entry := inside(at, list)) is not None:
            at = entry
            continue
        model = inside(at, BaseModel)
        if model is None and at in (dict[str, Any], Any):
            return  # options of what is named beside them
        assert model is not None, f"{key}: {part} is below a value"
        if model is AlgorithmConfig and part != "name":
            assert part in coefficients() | {field.name for field in fields(Algorithm)}, key
            if value and part in REGISTRIES:
                assert any(value in registry for registry in REGISTRIES[part]), span
            return
        assert part in model.model_fields, f"{key}: {part} is not a key of {model.__name__}"
        at = model.model_fields[part].annotation
    if value:
        TypeAdapter(at).validate_python(yaml.safe_load(value))
        names = {"explorer.workflow": workflows, "reward.name": rewards, "stages[].algorithm.name": presets}
        assert key not in names or value in names[key], span


def keys(text: str) -> Iterator[str]:
    """Spans that look like dotted keys of a run's config."""
    for span in SPAN.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        key = span.partition(": ")[0]
        dotted = KEY.fullmatch(key) and set(key) & {".", "["} and not key.endswith((".py", ".yaml", ".md", ".json"))
        if dotted and re.split(r"[.\[]", key)[0] in RunConfig.model_fields:
            yield span


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.parent.name)
def test_keys_in_a_guide_exist_and_take_the_values_beside_them(page: Path) -> None:
    text = page.read_text()
    for table in tables(text):
        if "rayrft key" in table[0]:  # other columns have keys of other systems
            column = table[0].index("rayrft key")
            for row in table[1:]:
                text = text.replace(f"| {row[0]} |", "|", 1)
                last = ""
                for span in SPAN.findall(row[column]):
                    known = KEY.match(span)
                    named = known is not None and re.split(r"[.\[]", known[0])[0] in RunConfig.model_fields
                    span = span if named or not last else f"{last}: {span}"
                    check(span)
                    last = span.partition(": ")[0]
    for span in keys(text):
        check(span)


@pytest.mark.parametrize("file", ["viewer/advisories.py", "monitor/verdict.py", "trainer/memory.py", "core/plan.py"])
def test_keys_in_the_advice_of_the_software_exist(file: str) -> None:
    """Those of a stage are named from it on, such as ``optimizer.lr``."""
    text = (ROOT / "rayrft" / file).read_text()
    constants = [each.value for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Constant)]
    texts = [each for each in constants if isinstance(each, str)]
    roots = {**dict.fromkeys(StageConfig.model_fields, "stages[]."), **dict.fromkeys(RunConfig.model_fields, "")}
    for key in re.findall(r"(?<![\w./])[a-z_]+(?:\.[a-z_]+)+(?![\w/(])", " ".join(texts)):
        if (root := roots.get(key.partition(".")[0])) is not None:
            check(f"{root}{key}")


def test_keys_that_do_not_exist_are_found() -> None:
    for span in ("tasks.sampling", "stages[].algorithm.clip", "stages[].algorithm.kl: k9", "model.dtype: int8"):
        with pytest.raises((AssertionError, ValueError)):
            check(span)


def test_the_defaults_of_other_systems_are_a_config() -> None:
    [block] = re.findall(r"```yaml\n(.*?)```", section(CONFIG, "## Migration"), re.DOTALL)
    given = {**base(), **yaml.safe_load(block), "demonstrations": {}}
    given["explorer"] = {**base()["explorer"], **given["explorer"]}
    assert [stage.groups for stage in load_config(given).stages] == [32, 32, 32]


def test_names_of_trl_are_those_of_the_installed_release() -> None:
    def names(package: str, file: str) -> set[str]:
        found = importlib.util.find_spec(package)
        assert found is not None and found.origin is not None
        tree = ast.parse(Path(found.origin).parent.joinpath(file).read_text())
        return {n.target.id for n in ast.walk(tree) if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}

    shared = names("transformers", "training_args.py") | names("trl", "trainer/base_config.py")
    files = {"`GRPOConfig`": "trainer/grpo_config.py", "`DPOConfig`": "trainer/dpo_config.py"}
    for table in tables(section(CONFIG, "### From TRL")):
        own = names("trl", files[table[0][0]])
        for [field, *_] in table[1:]:
            for name in SPAN.findall(field.split(": ")[0].split(" of ")[0]):
                assert name in shared | own, name


def test_the_tuning_guide_has_every_verdict_and_every_advice_in_its_order() -> None:
    verdicts, advice = tables(section(TRAINER, "## Tuning"))
    source = (ROOT / "rayrft" / "monitor" / "verdict.py").read_text()
    named = {*re.findall(r"\w+-bound", source), "short of groups"}
    named |= {found for found in ("engine and trainer disagree", "the loss clips the ratio", "the KL to the reference")}
    assert all(name in source for name in named)
    assert {row[0] for row in verdicts[1:]} - {""} == named
    assert [row[0] for row in advice[1:]] == [name for name, *_ in CHECKS]


def messages() -> str:
    """All texts of the source, one a line, with "…" for what is filled in."""
    texts = []
    for path in (ROOT / "rayrft").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                texts.append("".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values))
    return "\n".join(" ".join(text.split()) for text in texts)


def test_the_messages_of_the_troubleshooting_guide_are_those_of_the_source() -> None:
    [table] = tables(section(CORE, "## Troubleshooting by message"))
    quoted = [span for row in table[1:] for span in SPAN.findall(row[0])]
    source = messages()
    missing = [each for each in quoted if not re.search(".*".join(map(re.escape, each.split(" … "))), source)]
    assert len(quoted) >= 25 and not missing, missing


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.parent.name)
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    for file, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        target = page.parent / file if file else page
        assert "://" in file or target.exists(), file
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, anchor


def test_files_and_registrations_that_contributors_are_sent_to_exist() -> None:
    for span in SPAN.findall(re.sub(r"```.*?```", "", TESTS.read_text(), flags=re.DOTALL)):
        path, _, test = span.removeprefix("python -m pytest -q ").partition("::")
        if re.fullmatch(r"(?:rayrft|tests|jobs/recipes|\.ci)/[\w./]+", path) and "NAME" not in path:
            assert (ROOT / path).exists(), path
            assert not test or f"def {test}(" in (ROOT / path).read_text(), span
    for row in next(t for t in tables(section(TESTS, "## Where a piece goes")) if t[0][0] == "piece")[1:]:
        registered = re.findall(r"`@?(\w+)(?:\(\"name\"\))?` (?:and `\w+` )?in `([^`]+\.\w+)`", " ".join(row[1:3]))
        assert all(name in (ROOT / path).read_text() for name, path in registered), row
