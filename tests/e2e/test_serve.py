"""An application calls the endpoint of a run, gives rewards, and is what the run trains on; from other processes than
that of the command, which Ctrl-C ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import ray
import yaml
from ray._private.state import actors

import rayrft
from rayrft.errors import ConfigError, DataError, FeedbackRefused
from rayrft.monitor.records import NoteRecord, RestartRecord, StepRecord
from rayrft.monitor.summary import read_summary
from rayrft.viewer.timeline import read_spans
from tests.bench.lessons import calculator
from tests.bench.lessons.multiplier import converse
from tests.conftest import ROOT
from tests.e2e.conftest import WITHOUT_VLLM, Call, endpoint_of, free_port
from tests.e2e.serving import make_config
from tests.errors import about


def agent(base_url: str, api_key: str, session: str, stream: bool) -> str:
    """An agent loop that knows nothing of rayrft: it calls the tools that the model asks for, and asks again."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key, default_headers={"X-Session-Id": session})
    model = client.models.list().data[0].id
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    messages: list[Any] = [{"role": "user", "content": "Name a colour."}]
    for _ in range(2):
        if stream:
            parts = client.chat.completions.create(model=model, messages=messages, tools=tools, stream=True)
            said = "".join(chunk.choices[0].delta.content or "" for chunk in parts)
            messages.append({"role": "assistant", "content": said})
        else:
            answer = client.chat.completions.create(model=model, messages=messages, tools=tools).choices[0].message
            messages.append(answer.model_dump(exclude_none=True))
            for call in answer.tool_calls or []:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "blue"})
        messages.append({"role": "user", "content": "Sure?"})
    return session


def metrics_page(wanted: str) -> str:
    """What Prometheus would scrape. Ray's agents export on a schedule of their own, so ask until it is there."""
    import ray

    node = ray.nodes()[0]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    deadline = time.monotonic() + 200
    while True:
        page = httpx.get(url, timeout=60).text
        if wanted in page or time.monotonic() > deadline:
            return page
        time.sleep(1)


@contextlib.contextmanager
def command(path: Path, cluster: Any) -> Iterator[subprocess.Popen[str]]:
    """The command line, in a process of its own, at an endless run with an endpoint, which is up."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rayrft", "run", str(path), "stages.online.steps=10000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "RAY_ADDRESS": cluster.address_info["gcs_address"], "PYTHONUNBUFFERED": "1"},
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        seen: list[str] = []
        assert any(seen.append(line) or "endpoint at" in line for line in process.stdout), "".join(seen)
        yield process
    finally:
        process.kill()


def test_an_application_is_served_and_trained_on_though_the_keeper_dies_until_ctrl_c_saves_the_weights(
    ray_cluster: Any, tmp_path: Path, port: int, command_line: Call
) -> None:
    path = tmp_path / "served.yaml"
    path.write_text(yaml.safe_dump(make_config(tmp_path, port, **WITHOUT_VLLM)))
    with command(path, ray_cluster) as process:
        run = rayrft.attach("served")
        url = endpoint_of(run)
        assert url == f"http://127.0.0.1:{port}/served/v1"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=url, api_key="guess", max_retries=0).models.list()
        http = httpx.Client(base_url=url, headers={"Authorization": "Bearer sk-app"}, timeout=60)
        assert http.post("/chat/completions", content=b"x" * (5 << 20)).status_code == 413

        first = agent(url, "sk-app", "s-0", stream=False)
        reward = http.post("/feedback", json={"id": first, "reward": 0.0, "components": {"style": 1.0}})
        assert reward.json()["session_id"] == "s-0"
        assert http.post("/feedback", json={"id": first, "reward": 1.0}).status_code == 409
        for number in range(1, 4):
            run.reward(agent(url, "sk-app", f"s-{number}", stream=number % 2 == 0), float(number % 2))
        with pytest.raises(FeedbackRefused):
            run.reward("s-1", 1.0)
        with pytest.raises(DataError):
            run.reward("nobody", 1.0)
        rows = run.experiences(4)
        assert sorted(rows["reward"]) == [0.0, 0.0, 1.0, 1.0]

        for number in range(4, 8):
            run.reward(agent(url, "sk-app", f"s-{number}", stream=False), float(number % 2))
        agent(url, "sk-app", "unrewarded", stream=False)
        stats = http.get("/stats").json()
        assert stats["sessions"]["feedback"] == {"accepted": 8, "twice": 2, "unknown": 1}
        os.kill(run.pids()["keeper"], signal.SIGKILL)
        agent(url, "sk-app", "unrewarded too", stream=False)  # it waits, or is refused and tries again
        restart = next(record for record in run.records() if isinstance(record, RestartRecord))
        assert restart.actor == "keeper" and restart.seconds > 0
        for number in range(8, 16):
            run.reward(agent(url, "sk-app", f"s-{number}", stream=False), float(number % 2))
        next(record for record in run.records() if isinstance(record, StepRecord) and record.step == 2)

        again = command_line("run", str(path))
        assert again.returncode == 1 and "a run of this name is running (found 'served')" in again.stderr
        status = json.loads(command_line("status", "served").stdout)
        assert (status["status"], status["step"], status["trained"]) == ("running", 2, 16)
        assert status["sampled"] == status["trained"] + sum(status["dropped"].values()) + status["held"]
        assert "rayrft_train_reward" in metrics_page("rayrft_train_reward")
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=300)
        assert process.returncode == 130, rest
        assert "stopping after the current step" in rest and "stopped after" in rest
    summary = read_summary(run.folder)
    assert summary.status == "stopped" and summary.steps == 2
    assert summary.ledger.closes and summary.ledger.trained == 16, summary.ledger
    assert summary.ledger.dropped["keeper_died"] >= 1 and summary.ledger.dropped["run_ended"] >= 1
    assert {kind: restarts.count for kind, restarts in summary.restarts.items()} == {"keeper": 1}
    spans = [span for span in read_spans(run.folder, 0, math.inf) if span.actor.startswith("endpoint-")]
    assert ("engine-0", "generate") in {(span.lane, span.name) for span in spans}
    # Its weights have another name than those of a finished run.
    assert [summary.checkpoint] == [str(each) for each in (run.folder / "checkpoints").glob("stopped-*")]
    assert (Path(summary.checkpoint) / "model.safetensors").is_file()
    assert not (run.folder / "checkpoints" / "final").exists()
    missing = command_line("status", "served")
    assert missing.returncode == 1 and "no run of that name is on this cluster (found 'served')" in missing.stderr
    assert httpx.get(url.replace("/v1", "/health")).status_code == 404  # there is no such route any more


@pytest.mark.slow
def test_a_killed_run_leaves_no_endpoint_and_another_port_is_an_error(
    ray_cluster: Any, tmp_path: Path, port: int
) -> None:
    run = rayrft.start(make_config(tmp_path, port, name="killed", **WITHOUT_VLLM), say=lambda text: None)
    try:
        url = endpoint_of(run)
    finally:
        run.kill()
    until_gone(url)
    other = make_config(tmp_path, port, name="elsewhere", **WITHOUT_VLLM)
    run = rayrft.start({**other, "serve": {"port": free_port()}}, say=lambda text: None)
    with pytest.raises(ConfigError, check=about("serve.port")):
        run.result()


@pytest.mark.slow
async def test_a_thousand_streams_are_counted_and_neither_those_that_leave_nor_a_dead_replica_end_it_for_others(
    ray_cluster: Any, tmp_path: Path, port: int
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    config = make_config(tmp_path, port, name="crowded", **WITHOUT_VLLM)
    run = rayrft.start(config, say=lambda text: None)
    try:
        headers = {"Authorization": "Bearer sk-app"}
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=endpoint_of(run), headers=headers, timeout=300, limits=limits) as http:

            def body(number: int, **more: Any) -> dict[str, Any]:
                return {"model": "crowded", "messages": [{"role": "user", "content": f"Say {number}."}], **more}

            async def stream(number: int) -> int:
                async with http.stream("POST", "/chat/completions", json=body(number, stream=True)) as response:
                    if number % 4 == 0:
                        await anext(response.aiter_lines())
                        return response.status_code  # the client goes away
                    text = "".join([line async for line in response.aiter_lines()])
                    assert response.status_code == 429 or text.endswith("data: [DONE]")
                    return response.status_code

            async def all_are_answered() -> None:
                asked = [http.post("/chat/completions", json=body(number)) for number in range(8)]
                assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
                assert (now := ray.get(pool.members.remote())).generation == members.generation, now.names

            pool = ray.get_actor("crowded:engine_pool")
            members = ray.get(pool.members.remote())
            assert await stream(0) == 200  # it begins all that requests share, and leaves
            await all_are_answered()
            statuses = Counter(await asyncio.gather(*map(stream, range(1, 1000))))
            await all_are_answered()
            async with asyncio.timeout(60):  # that a client is gone is noticed a little later
                while (stats := (await http.get("/stats")).json())["open"] > 1:
                    pass
            named = ray.util.list_named_actors(all_namespaces=True)
            [replica] = [each for each in named if each["name"].startswith("SERVE_REPLICA::crowded:serve")]
            os.kill(actors(ray.get_actor(**replica)._actor_id.hex())["Pid"], signal.SIGKILL)
            asked = [http.post("/chat/completions", json=body(number)) for number in range(1500)]
            crowd = await asyncio.gather(*asked)
            async with asyncio.timeout(120):
                while (await http.post("/chat/completions", json=body(0))).status_code != 200:
                    pass
            await all_are_answered()
        restart = next(record for record in run.records() if isinstance(record, RestartRecord))
    finally:
        run.stop()
        summary = run.result()
        run.kill()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    refused = [answer for answer in crowd if answer.status_code == 503]
    assert refused and all(answer.headers["retry-after"] == "5" for answer in refused), "its queue was full"
    assert statuses == {200: 999} and summary.restarts.keys() == {"replicas"}
    assert restart.actor.startswith("crowded:serve#") and restart.seconds > 0
    assert stats["requests"].keys() == {"200", "499 client_gone"}
    assert sum(stats["sessions"]["calls"].values()) == 1016
    assert summary.ledger is not None and summary.ledger.closes and summary.ledger.sampled >= 1016 + 9


@pytest.mark.slow
@pytest.mark.parametrize("way", ["served", "acted"])
def test_an_application_that_rates_its_answers_gets_better_ones_and_so_does_the_same_agent_as_a_workflow(
    way: str, ray_cluster: Any, tmp_path: Path, port: int
) -> None:
    """Products by a tool, from a model that often guesses instead. The share of wrong answers falls by a third at
    least."""
    calculator.write_task(tmp_path, seed=1, demonstrations=600, least=10, beyond=100)
    config = {**calculator.make_config(tmp_path, seed=1, steps=45, controls=False), "name": way, "max_staleness": 2}
    config["tasks"]["eval_size"] = 50
    warmup, grpo = config["stages"]
    config["stages"] = [{**warmup, "steps": 300}, {**grpo, "batch_size": 64, "evaluate_every": None}]
    if way == "served":
        (tmp_path / "keys").write_text("sk-app\n")
        config |= {"mode": "serve", "serve": {"port": port, "keys_file": str(tmp_path / "keys")}}
        run = rayrft.start(config, say=lambda text: None)
        try:
            rights = apply(run, tmp_path)
            summary = run.result()
        finally:
            run.kill()
        first, last = (float(np.mean(part)) for part in (rights[:200], rights[-200:]))
    else:
        agent = "agent"
        options = {agent: {"agent": "tests.bench.lessons.multiplier:solve", "processes": 16}}
        config["explorer"] |= {"workflow": agent, "workflow_options": options}
        run = rayrft.start(config, say=lambda text: None)
        summary = run.result()
        steps = [step for step in run.records() if isinstance(step, StepRecord) and step.stage == "grpo"]
        first, last = (float(np.mean([step.reward for step in part])) for part in (steps[:3], steps[-3:]))
    assert summary.status == "finished" and summary.ledger is not None and summary.ledger.closes
    assert 1 - last < 2 / 3 * (1 - first), (first, last)


def apply(run: rayrft.Run, folder: Path) -> list[bool]:
    """Be an application from the warm-up's end until the run's: ask each question in eight sessions, and say whether
    the answers are right; return that in order."""
    records = run.records()
    up = (re.search(r"endpoint at (\S+)", record.text) for record in records if isinstance(record, NoteRecord))
    url = next(found[1] for found in up if found)
    next(record for record in records if record.stage == "grpo")
    tasks = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    client = openai.OpenAI(base_url=url, api_key="sk-app", max_retries=0)
    numbers, rights = count(), list[bool]()

    def ask() -> None:
        with contextlib.suppress(openai.APIError):  # the run has ended, and its endpoint with it
            while True:
                number = next(numbers)
                task = tasks[number // 8]
                ids = {"X-Session-Id": f"s-{number}", "X-Task-Id": task["question"]}
                right = converse(client.with_options(default_headers=ids), task["question"], "served") == task["answer"]
                client.post("/feedback", cast_to=object, body={"id": f"s-{number}", "reward": float(right)})
                rights.append(right)

    with ThreadPoolExecutor(16) as users:
        for _ in range(16):
            users.submit(ask)
    return rights


def until_gone(url: str) -> None:
    """Wait until Ray Serve, which deletes in the background, has no such route."""
    deadline = time.monotonic() + 60
    while httpx.get(url.replace("/v1", "/health"), timeout=60).status_code != 404:
        assert time.monotonic() < deadline
        time.sleep(0.2)  # Ray Serve has no event for it
