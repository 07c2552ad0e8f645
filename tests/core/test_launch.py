"""Which runs can be gone on with, and from where."""

from __future__ import annotations

import datetime
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rayrft.config import RunConfig, load_config
from rayrft.core import launch, shared_files
from rayrft.core.bundles import Bundles, check_room
from rayrft.core.checkpoints import Checkpoints, Progress
from rayrft.core.run_folder import open_folder
from rayrft.errors import ClusterError, ConfigError, PlacementError, RayrftError, RunFinished, RunNotFound, StorageError
from rayrft.experience import Task
from rayrft.monitor.summary import Totals, summarise, write_summary
from tests.config.given import base
from tests.core.given import run_folder, write
from tests.core.prepared import PREPARED
from tests.e2e.conftest import small_config
from tests.errors import about


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run that took its last step, stood at a checkpoint, and was killed before it wrote its summary."""
    config, progress = run_folder(tmp_path, "run"), Progress("id", step=5, stage=1, stage_step=2, stage_began=3)
    progress.end("mix", asked=2)
    write(Checkpoints(config.folder, config.checkpoint), progress, "__0_0.distcp")
    monkeypatch.setattr(launch, "_start", lambda config, progress, say: (config, progress))
    return config


def end(config: RunConfig, status: str, steps: int) -> None:
    write_summary(config.folder, replace(summarise(config.name, status, None, Totals(), None, 0.0), steps=steps))


def test_a_run_without_its_summary_is_resumed(ended: RunConfig) -> None:
    _, progress = launch.resume(ended.folder)  # type: ignore[misc]
    assert progress.step == 5
    end(ended, status="failed", steps=5)
    launch.resume(ended.folder)
    end(ended, status="finished", steps=3)  # of an earlier end, before it was asked for more
    launch.resume(ended.folder)


def test_a_finished_run_is_refused_unless_it_is_asked_for_more_steps(ended: RunConfig) -> None:
    end(ended, status="finished", steps=5)
    with pytest.raises(ConfigError, match=r"the run is finished after 5 steps .*raise stages\.mix\.steps"):
        launch.resume(ended.folder)
    config, _ = launch.resume(ended.folder, **{"stages.mix.steps": 3})  # type: ignore[misc]
    assert config.stages[1].steps == 3


@pytest.mark.parametrize("existing", ["rename", "refuse", "resume"])
def test_what_is_done_with_the_folder_of_an_earlier_run_is_chosen(ended: RunConfig, existing: str) -> None:
    config = load_config(ended, {"on_existing": existing})
    if existing == "refuse":
        with pytest.raises(ConfigError, match="name: a run of this name exists"):
            launch.start(config)
    else:
        _, progress = launch.start(config)  # type: ignore[misc]
        assert (progress is None) is (existing == "rename")
    fresh = load_config(config, {"name": "fresh"})
    assert launch.start(fresh) == (fresh, None), "there is no earlier run"
    end(ended, status="finished", steps=5)
    if existing == "resume":
        with pytest.raises(RunFinished):
            launch.start(config)
        more = load_config(config, {"stages.mix.steps": 3})
        assert launch.start(more)[1].step == 5  # type: ignore[index]


def test_a_run_whose_checkpoint_is_not_whole_is_refused_before_anything_starts(ended: RunConfig) -> None:
    (ended.folder / "checkpoints" / "step-000005" / "__0_0.distcp").unlink()
    with pytest.raises(StorageError) as error:
        launch.resume(ended.folder)
    assert error.value.field == "checkpoint"


def test_a_folder_that_was_moved_is_resumed_where_it_lies(ended: RunConfig, tmp_path: Path) -> None:
    moved = ended.folder.rename(tmp_path / "elsewhere-20260101-120000")
    config, _ = launch.resume(moved)  # type: ignore[misc]
    assert config.folder == moved


def test_a_run_that_did_not_begin_is_started_instead(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run folder", check=about("run", str(tmp_path))):
        launch.resume(tmp_path)
    config = run_folder(tmp_path, "run")
    with pytest.raises(ConfigError, match=r"the run was never started .*[Ss]tart it instead"):
        launch.resume(config.folder)


@pytest.mark.parametrize("reason", [ClusterError("no Ray cluster runs"), RunNotFound("no run of that name")])
def test_an_ended_run_has_its_status(ended: RunConfig, monkeypatch: pytest.MonkeyPatch, reason: RayrftError) -> None:
    monkeypatch.setattr(launch, "attach", mock.Mock(side_effect=reason))
    monkeypatch.setattr(launch, "starting_runs", lambda: ["another"])
    left = launch.find_status(str(ended.folder))
    assert (left.status, left.ended, left.folder) == ("killed", True, ended.folder) and "no summary" in str(left.error)
    end(ended, status="stopped", steps=4)
    monkeypatch.chdir(ended.folder.parent)
    Path("runs").mkdir()
    ended.folder.rename("runs/run")
    found = launch.find_status(ended.name)
    assert (found.status, found.step, found.error) == ("stopped", 4, None)
    with pytest.raises(type(reason)) as error:
        launch.find_status("nowhere")
    assert error.value is reason
    if isinstance(reason, RunNotFound):
        assert launch.find_status("another").status == "starting"


def room(monkeypatch: pytest.MonkeyPatch, *free: float, total: float) -> list[float]:
    """A node of that many CPUs in all, with these free as often as one looks; gives what is not looked at."""
    left = list(free)
    monkeypatch.setattr("ray._private.state.available_resources_per_node", lambda: {"n": node(left.pop(0))})
    monkeypatch.setattr("ray._private.state.total_resources_per_node", lambda: {"n": node(total)})
    monkeypatch.setattr("ray.nodes", lambda: [{"NodeID": "n", "NodeManagerHostname": "n", "Labels": {}, "Alive": True}])
    return left


def node(cpus: float) -> dict[str, float]:
    return {"CPU": cpus, "memory": float(1 << 40)}


PART = Bundles("a", 1, 2, 0, 0.1, "")


def test_what_a_run_that_has_just_ended_gives_back_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    left = room(monkeypatch, 1, 1, 2, total=2)
    check_room([PART])
    assert not left


def test_what_does_not_fit_on_an_empty_cluster_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    left = room(monkeypatch, 1, 1, total=1)
    with pytest.raises(PlacementError):
        check_room([PART])
    assert len(left) == 1


def test_a_run_that_waits_for_nodes_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    room(monkeypatch, 1, total=1)
    said: list[str] = []
    check_room([PART], wait_s=600, say=said.append)
    [line] = said
    assert line.startswith("waiting up to 600 s for nodes: the run needs 2 CPU and the cluster has 1 free: n 1 CPU")


@pytest.mark.parametrize("field", ["storage", "plugins", "images of tasks"])
def test_nodes_are_asked_for_files_before_inputs_are_prepared_and_for_images_after(
    ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """Operators on tasks start engines: a run that cannot work takes none."""
    (plugin := tmp_path / "plugin.py").touch()
    config = load_config(small_config(tmp_path / "runs", f"unseen-{os.getpid()}", plugins=[str(plugin)]))
    task = Task.create("pictures", "what is it?", "a square", images=[str(plugin)])
    prepare = mock.Mock(return_value=replace(PREPARED, tasks=[task]))

    def ask(nodes: set[str], look: Any, marker: Path, files: dict[str, list[str]]) -> dict[str, Any]:
        assert nodes == {"elsewhere"} and marker.exists()
        return {"node-2": [(field, "path")] if field in ("storage", *files) else []}

    monkeypatch.setattr(launch, "fitting_nodes", lambda parts: {"elsewhere"})
    monkeypatch.setattr(shared_files, "ask_nodes", ask)
    monkeypatch.setattr(launch, "prepare", prepare)
    with pytest.raises(ConfigError, check=about(field, "path")):
        launch.start(config, say=lambda _: None)
    assert prepare.called is (field == "images of tasks")
    assert config.name not in launch.starting_runs()


@pytest.mark.parametrize("of_run", [None, "tasks.json", "config.yaml"])
def test_only_the_folder_of_a_run_is_moved_out_of_the_way(of_run: str | None, tmp_path: Path) -> None:
    config = load_config({**base(), "storage": str(tmp_path)})
    config.folder.mkdir()
    open_folder(config)  # an empty folder holds nothing
    own = load_config(config, {"name": "own-data"})
    own.folder.mkdir()
    for name in filter(None, ("rows.jsonl", of_run)):
        (own.folder / name).write_text("kept")
    if of_run is None:
        with pytest.raises(ConfigError, check=about("name")):
            open_folder(own)
        assert [path.name for path in own.folder.iterdir()] == ["rows.jsonl"]
    else:
        open_folder(own)
        [moved] = tmp_path.glob("own-data-*")
        assert (moved / "rows.jsonl").read_text() == "kept" and not (own.folder / "rows.jsonl").exists()


def test_runs_that_ended_in_the_same_second_are_all_kept(tmp_path: Path) -> None:
    config = load_config({**base(), "storage": str(tmp_path)})
    for number in range(4):
        open_folder(config)
        (config.folder / "mine").write_text(str(number))
        os.utime(config.folder, (1e9, 1e9))
    found = {path.name: (path / "mine").read_text() for path in tmp_path.iterdir()}
    dated = f"{config.name}-{datetime.datetime.fromtimestamp(1e9):%Y%m%d-%H%M%S}"
    assert found == {dated: "0", f"{dated}-2": "1", f"{dated}-3": "2", config.name: "3"}
