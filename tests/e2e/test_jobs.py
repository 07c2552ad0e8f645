"""The configs in jobs/: all are loaded and planned, and run at their smallest; and the README's first commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from rayrft.config import load_config
from rayrft.core.checkpoints import Checkpoints, Progress
from rayrft.core.run_folder import write_config
from rayrft.monitor.summary import Summary, Totals, read_summary, summarise, write_summary
from tests.conftest import ROOT
from tests.core.given import write
from tests.e2e.conftest import Call

JOBS = sorted(path.stem for path in (ROOT / "jobs").glob("*.yaml") if path.stem != "quickstart_controls")
RUN = [name for name in JOBS if name not in ("bench", "gsm8k_grpo", "quickstart", "serve", "explore", "train")]
"""Those that run by themselves; the others need a GPU, the quickstart's model, requests, or each other."""


PLAN = """
import sys
from rayrft.config import load_config
from rayrft.core.parts.table import plan_placement
for path in sys.argv[1:]:
    config = load_config(path)
    assert plan_placement(config) and config.storage.is_absolute(), path
"""


def test_every_job_is_loaded_and_planned() -> None:
    """In a process of its own: the plug-ins of jobs register pieces."""
    files = [ROOT / "jobs" / f"{name}.yaml" for name in JOBS]
    done = subprocess.run([sys.executable, "-c", PLAN, *files], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [*JOBS, "quickstart_controls"])
def test_a_job_begins_with_what_it_does_how_it_is_run_and_what_it_takes(name: str) -> None:
    head = list(
        takewhile(lambda line: line.startswith("# "), (ROOT / "jobs" / f"{name}.yaml").read_text().splitlines())
    )
    assert len(head) >= 3 and re.match(r"# Run\b.*: (.* )?(rayrft|bash) ", head[-2])
    commands = re.findall(r"jobs/\w+\.(?:yaml|sh)", head[-2])
    assert f"jobs/{name}.yaml" in commands and all((ROOT / command).exists() for command in commands)
    assert re.search(r"\d+ s on two cores|\d+ GPUs", head[-1])


def test_a_finished_quickstart_that_is_resumed_ends_with_status_0(tmp_path: Path) -> None:
    """As `rayrft run` does: one command starts and resumes."""
    config = load_config(ROOT / "jobs" / "quickstart.yaml", {"storage": tmp_path})
    config.folder.mkdir()
    write_config(config)
    warmup, mix = config.stages
    progress = Progress("id", step=warmup.steps + mix.steps, stage=1, stage_step=mix.steps)
    progress.end(mix.name, asked=mix.steps)
    write(Checkpoints(config.folder, config.checkpoint), progress)
    ended = replace(summarise(config.name, "finished", None, Totals(), None, 0.0), steps=progress.step)
    write_summary(config.folder, ended)
    script = [str(ROOT / "jobs" / "quickstart.py"), f"storage={tmp_path}", "on_existing=resume"]
    done = subprocess.run([sys.executable, *script], capture_output=True, text=True)
    assert done.returncode == 0 and "the run is finished after 370 steps" in done.stdout, done.stderr


def run(command: Call, name: str, storage: Path, model: Path, *more: str) -> Summary:
    """Run a job at its smallest from the command line."""
    file = ROOT / "jobs" / f"{name}.yaml"
    config = yaml.safe_load(file.read_text())
    stages = [f"stages.{stage['name']}.steps=2" for stage in config["stages"]]
    tasks = ["tasks.eval_size=4"] if config.get("tasks", {}).get("eval_size") else []
    # After two steps of a warm-up nothing is right.
    groups = ["explorer.drop_zero_variance=false"] if config.get("tasks") else []
    judge = [f"auxiliary.grader.model={model}"] if "auxiliary" in config else []
    policy = [f"model.path={model}"] if "path" in config["model"] else []
    done = command("run", str(file), f"storage={storage}", *stages, *tasks, *groups, *judge, *policy, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_summary(storage / config["name"])


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_every_job_runs(other_process: Call, name: str, tmp_path: Path, tiny_model: Path) -> None:
    summary = run(other_process, name, tmp_path, tiny_model)
    assert summary.status == "finished" and summary.ledger.closes
    assert all(change.after.count for change in summary.accuracy.values()), "the rewards are known"


@pytest.mark.slow
def test_the_jobs_that_share_a_buffer_run(other_process: Call, tmp_path: Path, tiny_model: Path) -> None:
    with ThreadPoolExecutor() as both:
        explore = both.submit(run, other_process, "explore", tmp_path, tiny_model, "tasks.sources.0.size=40")
        train = both.submit(run, other_process, "train", tmp_path, tiny_model)
    assert explore.result().status == "finished" and train.result().ledger.closes


@pytest.mark.slow
def test_the_bench_runs(other_process: Call, tmp_path: Path, tiny_model: Path) -> None:
    models = [f"bench.models.{name}={tiny_model}" for name in ("untrained", "warmup", "mix")]
    size = ["tasks.eval_size=4", "bench.tasksets.longer.size=4", "bench.samples=2", "bench.k=[1,2]"]
    done = other_process("bench", str(ROOT / "jobs" / "bench.yaml"), f"storage={tmp_path}", *models, *size)
    assert done.returncode == 0, done.stdout + done.stderr
    attempts = tmp_path / "bench" / "bench" / "attempts"
    assert {model.name for model in attempts.iterdir()} == {"untrained", "warmup", "mix"}


@pytest.mark.slow
def test_the_endpoint_is_served_until_its_last_step(ray_cluster: Any, tmp_path: Path, port: int) -> None:
    size = [f"storage={tmp_path}", f"serve.port={port}", "stages.online.steps=1", "stages.online.batch_size=4"]
    command = [sys.executable, "-m", "rayrft", "serve", "policy", str(ROOT / "jobs" / "serve.yaml"), *size]
    environment = {**os.environ, "RAY_ADDRESS": ray_cluster.address_info["gcs_address"], "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        try:
            seen = list[str]()
            assert any(seen.append(line) or "endpoint at" in line for line in process.stdout), "".join(seen)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}/serve/v1", timeout=60) as http:
                model = http.get("/models").json()["data"][0]["id"]
                asked = {"model": model, "messages": [{"role": "user", "content": "Name a colour."}]}
                for number in range(4):
                    answer = http.post("/chat/completions", json=asked, headers={"X-Session-Id": f"s-{number}"})
                    assert answer.status_code == 200, answer.text
                    http.post("/feedback", json={"id": f"s-{number}", "reward": float(number % 2)}).raise_for_status()
            rest, _ = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0, rest
    assert read_summary(tmp_path / "serve").ledger.closes


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
