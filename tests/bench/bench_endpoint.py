"""Requests per second of the endpoint beside vLLM's own server, on the same model and in turn.

Chat completions of different questions from clients that ask again as soon as they are answered. rayrft's endpoint
records every call, with the run's trainer idle beside it. Both have one engine, in float32 on a CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np

import rayrft
from tests.bench.helpers import parse, spread, start_ray
from tests.e2e.conftest import endpoint_of, free_port

MODEL, MAX_LENGTH, KEY = "policy", 256, "key-of-the-bench"


@contextlib.contextmanager
def endpoint(folder: Path, proxy: str) -> Iterator[tuple[str, Path]]:
    """A run in mode serve; gives the endpoint's URL and the folder of its model."""
    config = {
        "name": "bench",
        "mode": "serve",
        "storage": str(folder),
        "max_staleness": 1,
        "model": {"tiny": {"layers": 2, "hidden_size": 128, "heads": 4}, "max_length": MAX_LENGTH},
        "explorer": {"engine": {"count": 1}},
        "trainer": {"ranks": 1},
        "serve": {"port": free_port(), "model_name": MODEL, "proxy": proxy, "keys_env": "RAYRFT_BENCH_KEYS"},
        "stages": [{"name": "idle", "algorithm": {"name": "grpo"}, "steps": 1, "batch_size": 64, "group_size": 8}],
    }
    os.environ["RAYRFT_BENCH_KEYS"] = KEY
    run = rayrft.start(config, say=lambda text: None)
    try:
        yield endpoint_of(run), run.folder / "model"
    finally:
        run.kill()


@contextlib.contextmanager
def vllm_server(model: Path) -> Iterator[str]:
    """vLLM's server, with what rayrft sets for its engines on a CPU; gives its URL."""
    port = free_port()
    options = f"--port {port} --dtype float32 --max-model-len {MAX_LENGTH} --max-num-seqs 256 --enforce-eager"
    quiet = "--disable-log-stats --no-enable-log-requests --disable-uvicorn-access-log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += [*options.split(), *quiet.split(), "--served-model-name", MODEL]
    command += ["--kv-cache-memory-bytes", str(64 << 20)]
    env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, env={**os.environ, **env}, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 300
            while not _answers(f"http://127.0.0.1:{port}/health"):
                if server.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(log.read()[-4000:].decode())
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            server.wait()


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url).status_code == 200
    return False


async def load(url: str, requests: int, clients: int, tokens: int) -> tuple[float, np.ndarray]:
    """Give the requests per second, and the seconds of each."""
    numbers, seconds = iter(range(requests)), list[float]()

    async def client(http: httpx.AsyncClient) -> None:
        for number in numbers:
            messages = [{"role": "user", "content": f"What follows {number}?"}]
            started = time.perf_counter()
            body = {"model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 1.0}
            (await http.post("/chat/completions", json=body)).raise_for_status()
            seconds.append(time.perf_counter() - started)

    async with httpx.AsyncClient(
        base_url=url, timeout=120, verify=False, headers={"Authorization": f"Bearer {KEY}"}
    ) as http:
        started = time.perf_counter()
        await asyncio.gather(*(client(http) for _ in range(clients)))
        return requests / (time.perf_counter() - started), np.array(seconds)


def main() -> None:
    options = parse(__doc__, requests=400, clients=16, tokens=16, rounds=3, proxy=("haproxy", "serve.proxy of the run"))
    start_ray()
    with (
        tempfile.TemporaryDirectory() as folder,
        endpoint(Path(folder), options.proxy) as (ours, model),
        vllm_server(model) as theirs,
    ):
        found: dict[str, list[tuple[float, float, float]]] = {"rayrft": [], "vllm": []}
        for number in range(-1, options.rounds):  # the first one warms up
            for name, url in (("rayrft", ours), ("vllm", theirs)):
                rate, seconds = asyncio.run(load(url, options.requests, options.clients, options.tokens))
                if number >= 0:
                    found[name].append((rate, *np.quantile(seconds, [0.5, 0.99])))
    for name, rounds in found.items():
        _, middle, slowest = np.median(rounds, axis=0) * 1e3
        rates = spread((rate for rate, _, _ in rounds), ".0f")
        print(f"{name}: {rates} requests/s, p50 {middle:.0f} ms, p99 {slowest:.0f} ms")


if __name__ == "__main__":
    main()
