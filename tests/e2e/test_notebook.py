"""The notebooks run from their first cell to their last, and each draws a picture."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import ROOT
from tests.e2e.conftest import WITHOUT_VLLM

NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
SMALL: dict[str, dict[str, Any]] = {"compare_algorithms": {"warmup_steps": 100, "steps": 8}}
"""Parameters of those that would take longest."""


def read(name: str, **parameters: Any) -> Any:
    """A notebook with other values in its second cell, of parameters."""
    notebook = nbformat.read(NOTEBOOKS[name], as_version=4)
    cell = notebook.cells[1]
    for parameter, value in parameters.items():
        assert re.search(rf"^{parameter} = ", cell.source, re.MULTILINE), parameter
        cell.source += f"\n{parameter} = {value!r}"
    return notebook


def execute(notebook: Any) -> list[Any]:
    """Execute a notebook, and return the outputs of its cells by media type."""
    resources = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=900, startup_timeout=600, resources=resources).execute()
    outputs = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any(kind in data for data in outputs for kind in ("image/png", "image/svg+xml")), "no picture was drawn"
    return outputs


@pytest.fixture(autouse=True)
def on_the_cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "ray_cluster" in request.fixturenames:
        cluster = request.getfixturevalue("ray_cluster")
        monkeypatch.setenv("RAY_ADDRESS", cluster.address_info["gcs_address"])


def test_the_quickstart_notebook_executes(ray_cluster: Any, tmp_path: Path) -> None:
    notebook = read("quickstart", warmup_steps=3, mix_steps=2, storage=str(tmp_path))
    # An untrained model earns nothing; without this every group would be dropped and the steps would never fill.
    start = next(cell for cell in notebook.cells if "rayrft.start" in cell.source)
    quick = '**{"explorer.drop_zero_variance": False, "tasks.eval_size": 20, "stages.mix.batch_size": 72, '
    quick += '"tasks.sources.0.size": 2000, "demonstrations.warmup.size": 200, '
    plugins, tolerance = WITHOUT_VLLM["plugins"], WITHOUT_VLLM["weight_sync"]["tolerance"]
    quick += f'"trainer.ranks": 1, "plugins": {plugins}, "weight_sync.tolerance": {tolerance}, '
    start.source = start.source.replace("**{", quick)
    pages = "".join(data.get("text/html", "") for data in execute(notebook))
    for part in ("engines and ranks run on the CPU", "accuracy", "rayrft view", "log-prob"):
        assert part in pages, part


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NOTEBOOKS.keys() - {"quickstart"}))
def test_a_notebook_executes(name: str, ray_cluster: Any, tmp_path: Path, port: int) -> None:
    address = {"port": port} if name == "feedback_and_dpo" else {}
    execute(read(name, storage=str(tmp_path), **address, **SMALL.get(name, {})))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_kept_without_outputs_and_its_links_lead_somewhere(name: str) -> None:
    cells = nbformat.read(NOTEBOOKS[name], as_version=4).cells
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
    assert cells[0].source.startswith("# ") and cells[1].source.startswith("# Parameters")
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", "".join(cell.source for cell in cells if cell.cell_type == "markdown"))
    assert links and not [link for link in links if not (ROOT / "notebooks" / link).exists()]
    assert "Read on" in cells[-1].source
