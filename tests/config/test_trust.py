"""Secrets stay out of configs, and reading a run folder runs no code of its author."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from ray.data._internal.object_extensions.arrow import ArrowPythonObjectArray

from rayrft.benchmark.bench import find_weights
from rayrft.benchmark.difficulty import write_solved
from rayrft.buffer.reader import Archive
from rayrft.config import dump_config, load_config, load_run_config
from rayrft.config.base import resolved
from rayrft.config.serve import FeedbackConfig
from rayrft.core import services
from rayrft.core.checkpoints import export
from rayrft.data.formats import open_rows
from rayrft.data.tables import open_table
from rayrft.errors import ConfigError, DataError, RayrftError
from rayrft.explorer.environments import register_environment
from rayrft.explorer.environments.base import environment_factory
from rayrft.monitor.summary import rows_in_log
from rayrft.rewards import build_reward, register_reward
from tests.config.given import base
from tests.errors import about

NOT_SAID = "a-secret-that-nobody-may-see"
MCP = "explorer.workflow_options.tool_calling.mcp.s"


def given(section: str, **values: Any) -> dict[str, Any]:
    sections: dict[str, dict[str, Any]] = {
        "mcp": {"explorer": {**base()["explorer"], "workflow_options": {"tool_calling": {"mcp": {"s": values}}}}},
        "reward": {"reward": {"name": "judge", "options": values}},
        "source": {"tasks": {"sources": [{"source": "ray", "read": "read_mongo", "options": values}]}},
    }
    return {**base(), **sections[section]}


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (given("mcp", env={"SEARCH_API_KEY": NOT_SAID}), f"{MCP}.env.SEARCH_API_KEY"),
        (given("mcp", env={"MAIL_PASSWORD": NOT_SAID}), f"{MCP}.env.MAIL_PASSWORD"),
        (given("mcp", url=f"https://me:{NOT_SAID}@host/mcp"), f"{MCP}.url"),
        (given("reward", url=f"https://host/v1?api_key={NOT_SAID}"), "reward.options.url"),
        (given("reward", api_key=NOT_SAID), "reward.options.api_key"),
        (given("reward", headers=[f"x: hf_{'aB3' * 11}"]), "reward.options.headers.0"),
        (given("reward", note=f"sk-proj-{'aB3' * 11}"), "reward.options.note"),
        (given("reward", note=f"ghp_{'aB3' * 12}"), "reward.options.note"),
        (given("reward", note="AKIAABCDEFGHIJKLMNOP"), "reward.options.note"),
        (given("source", uri=f"mongodb://user:{NOT_SAID}@host"), "tasks.sources.0.options.uri"),
        (given("source", token=NOT_SAID), "tasks.sources.0.options.token"),
    ],
)
def test_a_secret_in_a_config_is_refused_by_its_field_and_not_repeated(config: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match="env:NAME", check=about(field, None)) as refused:
        load_config(config)
    assert NOT_SAID not in str(refused.value) and "aB3aB3" not in str(refused.value)


def test_a_reference_where_none_is_resolved_is_refused() -> None:
    with pytest.raises(ConfigError, check=about("monitor.project", "env:PROJECT")):
        load_config({**base(), "monitor": {"project": "env:PROJECT"}})
    assert load_config(given("source", note="env: a text")).tasks is not None
    assert resolved({"note": "env: a text"}) == {"note": "env: a text"}


@pytest.mark.parametrize(
    "options",
    [
        {"token": "<|answer|>", "eos_token": "</s>", "pad_token": "[PADDING]", "sort_key": "difficulty"},
        {"url": "http://127.0.0.1:8000/v1", "path": "/data/sk-learn/hf_internal_testing", "key": "question_text"},
        {"url": "https://host/a?page=12345678&keyword=algebraic", "api_key": "env:SEARCH_API_KEY"},
        {"api_key": "none"},
    ],
)
def test_what_only_resembles_a_secret_is_taken(options: dict[str, Any]) -> None:
    config = load_config(given("source", **options))
    assert config.tasks is not None and config.tasks.sources[0].options == options
    assert load_config(yaml.safe_load(dump_config(config))) == config


def test_a_reference_to_a_variable_is_resolved_where_an_object_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TEST_SECRET", NOT_SAID)
    seen: list[Any] = []

    @register_reward("a_test_keyed_reward")
    def keyed(**options: Any) -> Any:
        seen.append(options)
        return lambda answer, task: 1.0

    @register_environment("a_test_keyed_environment")
    def environment_of(key: str) -> Any:
        seen.append(key)

    options = {"url": "env:A_TEST_SECRET", "nested": [{"key": "env:A_TEST_SECRET"}], "n": 3}
    environment = {"name": "a_test_keyed_environment", "options": {"key": "env:A_TEST_SECRET"}}
    changes = {"reward.name": "a_test_keyed_reward", "explorer.environment": environment}
    config = load_config(given("reward", **options), changes)
    assert NOT_SAID not in dump_config(config)
    build_reward(config.reward.name, config.reward.options)
    assert config.explorer.environment is not None
    environment_factory(config.explorer.environment)()
    assert seen == [{"url": NOT_SAID, "nested": [{"key": NOT_SAID}], "n": 3}, NOT_SAID]
    monkeypatch.delenv("A_TEST_SECRET")
    with pytest.raises(ConfigError, match="A_TEST_SECRET"):
        resolved(options)


class Pickled:
    """An object whose pickle makes a folder where it is read."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)


@pytest.mark.parametrize("saved", [False, True])
def test_a_file_of_rows_with_pickled_objects_is_refused_unread(saved: bool, tmp_path: Path) -> None:
    objects = ArrowPythonObjectArray.from_objects([Pickled(tmp_path / "ran")])
    table = pa.table({"question": ["1 + 1"], "answer": pa.StructArray.from_arrays([objects], ["of"])})
    path = tmp_path / "rows.parquet"
    pq.write_table(table, path)
    if saved:
        path = tmp_path / "saved"
        path.mkdir()
        (path / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
        with pa.ipc.new_stream(path / "data.arrow", table.schema) as stream:
            stream.write_table(table)
    with pytest.raises(DataError, check=about("columns.answer")):
        list(open_rows(path, "path").rows())
    if not saved:
        with pytest.raises(DataError, check=about("columns.answer", str(path))):
            open_table(path)
    assert not (tmp_path / "ran").exists()
    table.column("answer").to_pylist()
    assert (tmp_path / "ran").exists(), "else the test proves nothing"


class Elsewhere(Exception):
    """What a reader would do next, which needs a cluster."""


def _open_page(folder: Path) -> None:
    services.serve_feedback(folder, FeedbackConfig())


Read = Callable[[Path], Any]
READERS: list[Read] = [
    Archive.of_run,
    lambda folder: export(folder, folder / "out"),
    lambda folder: find_weights("a", str(folder), folder.parent, folder, "model"),
    lambda folder: write_solved(folder, folder / "out.jsonl"),
    rows_in_log,
    _open_page,
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    elsewhere = mock.Mock(side_effect=Elsewhere)
    monkeypatch.setattr(services, "connect", elsewhere)
    monkeypatch.setattr("rayrft.benchmark.difficulty.load_processed", elsewhere)
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config = load_config(base()).model_copy(update={"plugins": [tmp_path / "code.py"]})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    return tmp_path


@pytest.mark.parametrize("read", READERS)
def test_readers_of_a_folder_run_no_plugins_of_it(read: Read, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.suppress(RayrftError, Elsewhere):
        read(folder)
    assert not (folder / "ran").exists()
    assert "RAYRFT_TRUST_PLUGINS=1" in caplog.text and str(folder / "code.py") in caplog.text


def test_a_folder_that_needs_its_plugins_says_how_to_allow_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (folder / "config.yaml").read_text()
    needing = yaml.safe_load(text)
    needing["stages"][0]["algorithm"]["policy_loss"] = "of_a_plugin"
    (folder / "config.yaml").write_text(yaml.safe_dump(needing))
    with pytest.raises(ConfigError, match="RAYRFT_TRUST_PLUGINS=1") as refused:
        load_run_config(folder)
    assert str(folder / "code.py") in str(refused.value) and not (folder / "ran").exists()
    (folder / "config.yaml").write_text(text)
    monkeypatch.setenv("RAYRFT_TRUST_PLUGINS", "1")
    assert load_run_config(folder).plugins == [folder / "code.py"] and (folder / "ran").exists()
    monkeypatch.delenv("RAYRFT_TRUST_PLUGINS")
    assert load_run_config(folder).plugins == [folder / "code.py"], "this process has run them"
