"""What the tests share. Ray and vLLM are started once and kept: most of their time is importing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import yaml
from hypothesis import settings

from rayrft.experience import Task

if TYPE_CHECKING:
    from rayrft.core.preflight import PreparedRun

os.environ.setdefault("OMP_NUM_THREADS", "1")  # beside other lanes, threads that wait for each other only burn time
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # nice workers would get nothing beside other lanes
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# How long an example takes says more about what else the machine does.
settings.register_profile("rayrft", deadline=None)
settings.load_profile("rayrft")

ROOT = Path(__file__).resolve().parents[1]
# Whole runs, too, but so long ones that another lane begins with them.
LEARNING = "tests/e2e/test_learning.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest first, so that all lanes end with what is short: whole runs, and then what needs a cluster."""
    with_cluster = {_unit(item.nodeid) for item in items if "ray_cluster" in getattr(item, "fixturenames", ())}

    def rank(item: pytest.Item) -> int:
        unit = _unit(item.nodeid)
        return ["runs", LEARNING].index(unit) if unit in ("runs", LEARNING) else 3 - (unit in with_cluster)

    items.sort(key=rank)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Lanes, each with a Ray cluster of its own: whole runs one after another, and beside them the other modules, of
    which a lane takes the next one whenever it is done."""
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _unit(nodeid)

    config.option.loadscopereorder = False
    return Lanes(config, log)


def _unit(nodeid: str) -> str:
    """What the test is kept together with: the whole runs, or its module."""
    module = nodeid.split("::")[0]
    return "runs" if module.startswith("tests/e2e/") and module != LEARNING else module


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """One local cluster for all tests of a lane, with a dashboard to submit jobs to, and GPUs to place by, if only in
    name."""
    import ray
    import torch
    from ray._private.parameter import RayParams

    # ray.init puts the agent that takes jobs at one port, whatever the cluster: a second one on the machine has none.
    anywhere = partial(RayParams, dashboard_agent_listen_port=0)
    gpus = None if torch.cuda.is_available() else 4
    with mock.patch("ray._private.parameter.RayParams", anywhere):
        context = ray.init(
            address="local",
            num_cpus=4,
            num_gpus=gpus,
            namespace="rayrft",
            include_dashboard=True,
            log_to_driver=False,
            # The GCS keeps the connection on which a dead process waited for news this long, 300 s by default.
            _system_config={"subscriber_timeout_ms": 30_000},
        )
    yield context
    ray.shutdown()


@pytest.fixture(autouse=True)
def without_waits_for_room() -> Iterator[None]:
    """A Buffer or Master of an earlier test lets the writes of this process wait for room on a full disk."""
    from rayrft.files import Room

    with mock.patch.object(Room, "limit_s", 0.0):
        yield


@pytest.fixture(scope="module")
def forked_templates() -> Iterator[None]:
    """Process pools start at once, as the processes of `tests.runtime.forks` do."""
    from tests.runtime.forks import forked_templates

    with forked_templates():
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from tests.browser import launched

    with launched() as started:
        yield started


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with its tokenizer, for spelling tasks."""
    from rayrft.config.model import TinyModelConfig
    from rayrft.trainer.tiny import make_tiny_model

    folder = tmp_path_factory.mktemp("tiny")
    prompts = [f"Spell this word backward: {word}" for word in ("cat", "horse", "bird")]
    make_tiny_model(TinyModelConfig(layers=2, hidden_size=64, heads=2), prompts, [], folder, max_length=64, seed=0)
    return folder


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedRun:
    """The inputs of whole runs in simulated time."""
    from tests.chaos.kills import make_prepared

    return make_prepared(tmp_path_factory.mktemp("prepared"))


@pytest.fixture(scope="session")
def recorded_runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The folder of the runs that `record_runs` writes. Who changes one takes a copy."""
    from tests.viewer.recorded import record_runs

    folder = tmp_path_factory.mktemp("runs")
    record_runs(folder, tiny_model)
    return folder


@pytest.fixture(scope="session")
def squares(tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    """Tasks about pictures."""
    from rayrft.config.tasks import TaskSourceConfig
    from rayrft.data.task_sources import draw_squares

    folder = tmp_path_factory.mktemp("squares")
    return draw_squares(TaskSourceConfig(source="squares", path=folder, size=12), "tasks.sources.0")


@pytest.fixture(scope="session")
def tiny_vision_model(tmp_path_factory: pytest.TempPathFactory, squares: list[Task]) -> Path:
    """A small random model that takes images, with its tokenizer and processor."""
    from rayrft.config.model import TinyModelConfig
    from rayrft.trainer.tiny import make_tiny_model

    folder = tmp_path_factory.mktemp("tiny-vision")
    config = TinyModelConfig(vision=True, layers=2, hidden_size=64, heads=2)
    prompts, answers = [task.question for task in squares], [task.answer for task in squares]
    make_tiny_model(config, prompts, answers, folder, max_length=64, seed=0)
    return folder


@pytest.fixture(scope="session")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real word problems as the hub lays them out: all in ``$RAYRFT_TEST_DATA/gsm8k``, or the few in tests/samples."""
    rows = Path(os.environ.get("RAYRFT_TEST_DATA", ROOT / "tests" / "samples"), "gsm8k")
    folder = tmp_path_factory.mktemp("hub") / "gsm8k"
    shutil.copytree(rows, folder / "main")
    splits = [{"split": split, "path": f"main/{split}.jsonl"} for split in ("train", "test")]
    configs = [{"config_name": name, "data_files": splits} for name in ("main", "socratic")]
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")
    return folder
