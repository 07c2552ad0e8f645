"""The configs in jobs/: all are loaded and planned, and run at their smallest; and the README's first commands."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import rayrft
from rayrft.config import load_config
from rayrft.core.parts.table import plan_placement
from tests.conftest import ROOT

JOBS = sorted(path.stem for path in (ROOT / "jobs").glob("*.yaml") if path.stem != "quickstart_controls")
RUN = [name for name in JOBS if name not in ("bench", "gsm8k_grpo", "quickstart", "serve", "explore", "train")]
"""Those that run by themselves; the others need a GPU, the quickstart's model, requests, or each other."""


@pytest.mark.parametrize("name", JOBS)
def test_every_job_is_loaded_and_planned(name: str) -> None:
    text = (ROOT / "jobs" / f"{name}.yaml").read_text()
    assert len([line for line in text.splitlines() if line.startswith("#")]) >= 2 and f"jobs/{name}.yaml" in text
    assert plan_placement(load_config(ROOT / "jobs" / f"{name}.yaml"))


def smallest(name: str, storage: Path, model: Path) -> dict[str, Any]:
    """Overrides with which a job takes seconds."""
    config = load_config(ROOT / "jobs" / f"{name}.yaml")
    changes: dict[str, Any] = {"storage": str(storage)}
    changes |= {f"stages.{stage.name}.steps": 2 for stage in config.stages}
    changes |= {"tasks.eval_size": 4} if config.tasks and config.tasks.eval_size else {}
    if "grader" in config.auxiliary:
        changes["auxiliary.grader.model"] = str(model)
    if config.model.path:
        changes["model.path"] = str(model)
    if config.explorer.drop_zero_variance and config.tasks:
        changes["explorer.drop_zero_variance"] = False  # after two steps of a warm-up nothing is right
    return changes


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_every_job_runs(ray_cluster: Any, name: str, tmp_path: Path, tiny_model: Path) -> None:
    file = ROOT / "jobs" / f"{name}.yaml"
    summary = rayrft.start(file, say=lambda _: None, **smallest(name, tmp_path, tiny_model)).result()
    assert summary.status == "finished" and summary.ledger.closes


@pytest.mark.slow
def test_the_jobs_that_share_a_buffer_run(ray_cluster: Any, tmp_path: Path, tiny_model: Path) -> None:
    runs = [
        rayrft.start(ROOT / "jobs" / f"{name}.yaml", say=lambda _: None, **smallest(name, tmp_path, tiny_model), **more)
        for name, more in (("explore", {"tasks.sources.0.size": 40}), ("train", {}))
    ]
    assert all(run.result().ledger.closes for run in reversed(runs))


@pytest.mark.slow
def test_the_first_commands_of_the_readme_run_in_an_empty_home(tmp_path: Path) -> None:
    """In a clone with the tests' environment; the quickstart takes two steps instead of 370."""
    readme = (ROOT / "README.md").read_text()
    [commands, *_] = re.findall(r"```bash\n(.*?)```", readme, re.DOTALL)
    [config, *_] = re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL)
    clone = tmp_path / "rayrft"
    subprocess.run(["bash", ROOT / "cluster" / "setup.sh"], check=True)  # so that the clone's call installs nothing
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    (clone / ".venv").symlink_to(ROOT / ".venv")
    (clone / "my.yaml").write_text(config)
    quick = "tasks.eval_size=20 stages.warmup.steps=1 stages.mix.steps=1 stages.mix.batch_size=72"
    quick += " explorer.drop_zero_variance=false"
    script = commands.replace("jobs/quickstart.sh ", f"jobs/quickstart.sh {quick} ")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        ["bash", "-ec", script], cwd=clone, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (clone / "runs/my-run/checkpoints/final").is_dir()
