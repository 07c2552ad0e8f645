"""A Prometheus server that reads Ray's metrics, and what the dashboard's queries find in it."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.conftest import ROOT
from tests.e2e.conftest import free_port

GRAFANA, PROMETHEUS = ROOT / "cluster" / "grafana", ROOT / "cluster" / "prometheus"
DASHBOARD = json.loads((GRAFANA / "rayrft.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = {f"{panel['title']} {each['refId']}": each["expr"] for panel in PANELS for each in panel["targets"]}

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="Prometheus is missing: apt-get install prometheus",
)


class Prometheus:
    """A real one that scrapes a cluster as cluster/prometheus says, only more often."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=f"{url}/api/v1", timeout=60, trust_env=False)

    def series(self, query: str) -> list[dict[str, Any]]:
        found = self._http.get("/query", params={"query": query})
        assert found.status_code == 200, found.text
        return list(found.json()["data"]["result"])

    def errors(self) -> list[str]:
        """The errors of the latest scrapes."""
        found = self._http.get("/targets").json()["data"]["activeTargets"]
        return [f"{each['scrapeUrl']}: {each['lastError']}" for each in found if each["lastError"]]

    def alerts(self) -> dict[str, str]:
        found = self._http.get("/rules").json()["data"]["groups"]
        return {rule["name"]: rule["health"] for group in found for rule in group["rules"]}

    def empty(self, run: str) -> list[str]:
        """The queries of panels that have no data of a run."""
        return [name for name, query in QUERIES.items() if not self.series(query.replace("$run", run))]


@contextmanager
def prometheus(cluster: Any, folder: Path) -> Iterator[Prometheus]:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "5s", "scrape_timeout": "5s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(PROMETHEUS / "alerts.yml")]
    [scraped] = config["scrape_configs"]
    [found] = scraped["file_sd_configs"]
    [listed] = found["files"]
    found["files"] = [listed.replace("/tmp/ray/session_latest", cluster.address_info["session_dir"])]
    assert Path(found["files"][0]).is_file()
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    arguments = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    process = subprocess.Popen(
        ["prometheus", *arguments, f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        assert any("Server is ready" in line for line in process.stderr), "it does not start"
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.communicate()


def until_complete(source: Prometheus, run: str, limit_s: float) -> list[str]:
    """Wait for data of all panels; Ray's agents export on a schedule of their own. Return the errors of scrapes and the
    queries that have none."""
    deadline = time.monotonic() + limit_s
    while (empty := source.empty(run)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return [*source.errors(), *empty] if empty else []
