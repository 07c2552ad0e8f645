"""However a run ends, what it held is free again, and the same process can go on with it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import rayrft
from rayrft.cli.main import app
from rayrft.core.launch import find_status
from rayrft.core.placement import JANITOR, actor_name
from rayrft.errors import ActorDied, PlacementError
from rayrft.monitor.records import StepRecord
from rayrft.runtime.handle import Watched, fetch, find_actor, until_restarted
from tests.conftest import ROOT
from tests.core.leftovers import alive, free, groups, until_free
from tests.e2e.conftest import WITHOUT_VLLM, small_config


def step(run: rayrft.Run) -> None:
    """Returns when the run has taken a step."""
    next(record for record in run.records() if isinstance(record, StepRecord))


def kill(run: rayrft.Run) -> None:
    step(run)
    run.kill()


def fail(run: rayrft.Run, actor: str = "trainer") -> None:
    next(run.records())  # it is being started
    os.kill(run.pids()[actor], signal.SIGKILL)
    with pytest.raises(ActorDied):
        run.result()


def lose_the_master(run: rayrft.Run) -> None:
    fail(run, "master")


def stop(run: rayrft.Run) -> None:
    next(run.records())
    assert CliRunner().invoke(app, ["stop", "ending"]).exit_code == 0
    assert run.result().status == "stopped"


def finish(run: rayrft.Run) -> None:
    assert run.result().status == "finished"


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    "ends", [(kill, fail, finish), pytest.param((lose_the_master, stop, finish), marks=pytest.mark.slow)]
)
def test_a_run_gives_everything_back_however_it_ends_and_can_be_gone_on_with(
    ends: tuple[Callable[[rayrft.Run], None], ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path, "ending", evaluation={"enabled": False}, **WITHOUT_VLLM)
    config |= {"stages": [{**config["stages"][0], "steps": 1_000_000}], "restarts": {"per_hour": 0}}
    held, living, room = groups(), alive(), free()
    run = rayrft.start(config, say=lambda _: None)
    for end, following in zip(ends, [*ends[1:], None], strict=True):
        end(run)
        assert groups() <= held, end.__name__
        until_free(living, room)
        if following is not None:
            enough = {"stages.warmup.steps": len(run.metrics()) + 1} if following is finish else {}
            run = rayrft.resume(run.folder, say=lambda _: None, **enough)
    assert "Janitor" not in "".join(capfd.readouterr()), "Ray repeats no call of an actor that a run has ended"


def test_a_run_whose_janitor_and_then_driver_are_killed_saves_its_weights_and_gives_everything_back(
    ray_cluster: Any, tmp_path: Path
) -> None:
    config = small_config(tmp_path, "orphaned", evaluation={"enabled": False}, **WITHOUT_VLLM)
    config["stages"] = [{**config["stages"][0], "steps": 1_000_000}]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    folder, held, living, room = Path(config["storage"]) / "orphaned", groups(), alive(), free()
    environment = {**os.environ, "RAY_ADDRESS": ray_cluster.address_info["gcs_address"]}
    command = [sys.executable, "-m", "rayrft", "run", str(tmp_path / "config.yaml")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as driver:
        assert driver.stdout is not None
        assert any("]  sft" in line for line in driver.stdout), "it takes steps"
        assert alive() > living
        try:
            janitor = find_actor(actor_name("orphaned", JANITOR))
            assert janitor is not None
            os.kill(pid := fetch(janitor.call(Watched.pid)), signal.SIGKILL)
            asyncio.run(until_restarted(janitor, pid))
            assert any("]  sft" in line for line in driver.stdout), "it has repeated its calls of the janitor"
        finally:
            driver.kill()
    deadline = time.monotonic() + 60
    while not (folder / "summary.json").exists():  # it is told to stop once the death is noticed
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with pytest.raises(PlacementError, match="1000"):  # a resumed run first waits for the end of this one
        rayrft.resume(folder, say=lambda _: None, **{"trainer.cpus": 1000})
    status = find_status(str(folder))
    assert status.status == "stopped" and status.step > 0
    assert (folder / "checkpoints" / f"stopped-{status.step}" / "model.safetensors").exists()
    until_free(living, room)
    assert groups() <= held


def planned(lines: Iterator[str], folder: Path) -> None:
    assert any("trainer" in line for line in lines), "the plan is shown"


def starting(lines: Iterator[str], folder: Path) -> None:
    assert "engines" in next(line for line in lines if "starting" in line)


def stepping(lines: Iterator[str], folder: Path) -> None:
    assert any("]  sft" in line for line in lines)


def saving(lines: Iterator[str], folder: Path) -> None:
    stepping(lines, folder)
    while not [*folder.glob("checkpoints/.step-*.partial")]:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("phase", [planned, starting, stepping, saving])
def test_ctrl_c_once_saves_and_twice_ends_at_once_in_every_phase(
    ray_cluster: Any, phase: Callable[[Iterator[str], Path], None], times: int, tmp_path: Path
) -> None:
    config = small_config(tmp_path, "interrupted", evaluation={"enabled": False}, **WITHOUT_VLLM)
    warmup, *rest = config["stages"]
    stages = [{**warmup, "steps": 1_000_000}, *(rest if phase is starting else [])]  # the others start sooner
    config |= {"stages": stages, "checkpoint": {"every": 1}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    folder, held, living, room = Path(config["storage"]) / "interrupted", groups(), alive(), free()
    environment = {**os.environ, "RAY_ADDRESS": ray_cluster.address_info["gcs_address"]}
    command = [sys.executable, "-m", "rayrft", "run", str(tmp_path / "config.yaml")]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, env=environment, cwd=ROOT, **pipes) as driver:
        assert driver.stdout is not None
        said = list[str]()
        lines = (said.append(line) or line for line in driver.stdout)
        phase(lines, folder)
        driver.send_signal(signal.SIGINT)
        if times == 2 and any("press again" in line for line in lines):
            driver.send_signal(signal.SIGINT)
        said += driver.stdout
    assert driver.returncode == 130, said
    assert not any("Traceback" in line or "retries remaining" in line for line in said), said
    until_free(living, room)
    assert groups() <= held
    if phase in (stepping, saving) or (folder / "summary.json").exists():
        status = find_status(str(folder))
        assert status.status == ("stopped" if times == 1 else "killed")
        saved = folder / "checkpoints" / f"stopped-{status.step}" / "model.safetensors"
        assert saved.exists() or times == 2 or status.step == 0
