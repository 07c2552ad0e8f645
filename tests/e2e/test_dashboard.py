"""A real Prometheus beside a real run: every panel has data while it trains, and a death makes an alert fire."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import rayrft
from tests.cluster.prometheus import needs_prometheus, prometheus, until_complete
from tests.e2e.conftest import WITHOUT_VLLM, small_config


@pytest.mark.slow
@needs_prometheus
def test_every_panel_has_data_of_a_running_run_and_only_a_death_makes_an_alert_fire(
    ray_cluster: Any, tmp_path: Path
) -> None:
    config = small_config(tmp_path, "watched", **WITHOUT_VLLM, max_staleness=1, restarts={"per_hour": 1})
    config["stages"] = [{**config["stages"][1], "steps": 10_000, "evaluate_every": 5}]
    run = rayrft.start(config, say=lambda text: None)
    firing = 'ALERTS{alertstate="firing", run="watched"}'
    try:
        with prometheus(ray_cluster, tmp_path) as source:
            assert until_complete(source, "watched", 240) == []
            assert source.series(firing) == []
            os.kill(run.pids()["explorer-0"], signal.SIGKILL)
            deadline = time.monotonic() + 120
            while not (found := source.series(firing)) and time.monotonic() < deadline:
                time.sleep(0.5)
            assert [(each["metric"]["alertname"], each["metric"]["part"]) for each in found] == [
                ("RayrftRestarts", "explorer")
            ]
            assert float(source.series('ray_rayrft_restarts_total{run="watched"}')[0]["value"][1]) == 1
            run.stop()
            run.result()
            deadline = time.monotonic() + 120
            left = '{__name__=~"ray_rayrft_(train_loss|limit_.+)", run="watched"}'
            # Rules are evaluated some seconds after what they ask for has gone.
            while source.series(left) + source.series(firing) and time.monotonic() < deadline:
                time.sleep(0.5)
            assert source.series(left) == [] == source.series(firing)
    finally:
        run.kill()
