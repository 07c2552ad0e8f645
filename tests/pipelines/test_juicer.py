"""Operators of Data-Juicer by their names, in an environment that has it; what can be tested without it is, too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rayrft.config.pipelines import OperatorConfig
from rayrft.errors import ConfigError, OperatorFailed
from rayrft.pipelines.operators.juicer import PACKAGES, PYTHON
from rayrft.pipelines.rows import lineage
from tests.errors import about
from tests.pipelines.small import left_out, linked, rows, run

pytestmark = pytest.mark.usefixtures("forked_templates")


@pytest.fixture(scope="module")
def data_juicer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An environment with Data-Juicer, made as README says unless one is named."""
    if PYTHON in os.environ:
        return (yield)
    folder = tmp_path_factory.mktemp("juicer")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin/pip", "install", "-q", *PACKAGES, "ray"], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PYTHON, str(folder / "bin/python"))
        yield
    shutil.rmtree(folder)


def there(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test with Data-Juicer, whose installation takes minutes."""
    return pytest.mark.slow(pytest.mark.usefixtures("data_juicer")(test))


LINKED: list[dict[str, Any]] = [{"question": "see https://a.b/c now", "answer": "1", "more": {"a": [1]}}]
for number, text in enumerate(["the same", "short", "the same"], start=2):
    LINKED.append({"question": text, "answer": str(number), "more": None})


@there
def test_a_mapper_changes_texts_and_nothing_else(tmp_path: Path) -> None:
    found, done = run(LINKED, tmp_path, [{"juicer": "clean_links_mapper"}], batch_rows=3)
    assert [row["question"] for row in found] == ["see  now", "the same", "short", "the same"]
    assert [(row["answer"], row["more"]) for row in found] == [(row["answer"], row["more"]) for row in LINKED]
    assert done.reports[0].changed == 1


@there
def test_filters_and_deduplicators_leave_rows_out_whatever_the_batches(tmp_path: Path) -> None:
    operators = [
        {"juicer": "text_length_filter", "min_len": 6},
        {"juicer": "document_deduplicator", "lowercase": True},
        {"juicer": "clean_links_mapper", "repl": "LINK"},
    ]
    for size in (1, 3):
        found, done = run(LINKED, tmp_path, operators, batch_rows=size)
        assert [row["question"] for row in found] == ["see LINK now", "the same"]
        assert sorted(left_out(done).items()) == [
            ("juicer: document_deduplicator leaves it out", 1),
            ("juicer: text_length_filter leaves it out", 1),
        ]


@there
def test_rows_that_a_mapper_makes_have_their_parents(tmp_path: Path) -> None:
    chunks = {"juicer": "text_chunk_mapper", "max_len": 12, "overlap_len": 0}
    found, _ = run(LINKED, tmp_path, [{**chunks, "makes_rows": True}])
    made = [row for row in found if row["made_by"]]
    assert "".join(row["question"] for row in made) == LINKED[0]["question"] and len(found) == 3 + len(made) > 4
    assert {row["answer"] for row in made} == {"1"} and len({row["id"] for row in made}) == len(made)
    assert {lineage(row).made_by for row in made} == {"juicer/text_chunk_mapper"}
    with pytest.raises(OperatorFailed, match="makes_rows: true"):
        run(LINKED, tmp_path, [chunks])


@there
def test_what_data_juicer_does_not_take_is_told_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(OperatorFailed, match="near: clean_links_mapper"):
        run(LINKED, tmp_path, [{"juicer": "clean_link_mapper"}])
    with pytest.raises(OperatorFailed, match="text_length_filter has no option 'min_length'"):
        run(LINKED, tmp_path, [{"juicer": "text_length_filter", "min_length": 6}])
    with pytest.raises(OperatorFailed, match="'>=' not supported"):
        run(LINKED, tmp_path, [{"juicer": "text_length_filter", "min_len": []}])


def test_what_cannot_work_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    for options, field in (
        ({"juicer_python": "/no/such/python"}, "operators.0.juicer_python"),
        ({"juicer": "naive_grouper", "juicer_python": sys.executable}, "operators.0.juicer"),
        ({"juicer_python": sys.executable, "column": "answers"}, "operators.0.juicer"),
        ({}, "operators.0.juicer"),
    ):
        with pytest.raises(ConfigError, check=about(field)):
            linked(rows(question=["q"]), OperatorConfig.model_validate({"juicer": "clean_links_mapper", **options}))


@pytest.mark.slow
def test_ray_makes_the_environment_where_none_is_named(
    ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PYTHON, "")  # and what is set there is undone
    operators = [{"juicer": "text_length_filter", "min_len": 6}, {"juicer": "clean_links_mapper"}]
    for workers in (1, 2):
        found, _ = run(LINKED, tmp_path, operators, batch_rows=2, workers=workers)
        assert [row["question"] for row in found] == ["see  now", "the same", "the same"]
    made = Path(os.environ[PYTHON]).parents[2]
    assert made.parent.name == "pip"
    shutil.rmtree(made)


class _Without:
    def python(self) -> str:
        raise OSError("no space left")


def test_an_environment_that_ray_cannot_make_is_an_error(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON, raising=False)
    monkeypatch.setattr("rayrft.pipelines.operators.juicer.PACKAGES", [])
    monkeypatch.setattr("rayrft.pipelines.operators.juicer._Inside", _Without)
    with pytest.raises(ConfigError, match="no space left", check=about("operators.0.juicer")):
        linked(rows(question=["q"]), OperatorConfig.model_validate({"juicer": "clean_links_mapper"}))


def test_an_interpreter_without_data_juicer_says_so(tmp_path: Path) -> None:
    stub = tmp_path / "python"
    stub.write_text("#!/bin/sh\necho it is broken >&2\nexit 3\n")
    stub.chmod(0o755)
    said = {sys.executable: "No module named 'data_juicer'", str(stub): "ended with code 3, and said: it is broken"}
    for python, words in said.items():
        with pytest.raises(OperatorFailed, match=words):
            run(LINKED, tmp_path, [{"juicer": "clean_links_mapper", "juicer_python": python}])
    assert not (tmp_path / "out.jsonl").exists()
