"""The notebook runs from its first cell to its last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import ROOT
from tests.e2e.conftest import WITHOUT_VLLM


def test_the_quickstart_notebook_executes(ray_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address_info["gcs_address"])
    notebook = nbformat.read(ROOT / "notebooks/quickstart.ipynb", as_version=4)
    parameters = notebook.cells[1]
    assert "mix_steps" in parameters.source
    parameters.source = f"warmup_steps, mix_steps, storage = 3, 2, {str(tmp_path)!r}"
    # An untrained model earns nothing; without this every group would be dropped and the steps would never fill.
    start = next(cell for cell in notebook.cells if "rayrft.start" in cell.source)
    quick = '**{"explorer.drop_zero_variance": False, "tasks.eval_size": 20, "stages.mix.batch_size": 72, '
    quick += '"tasks.sources.0.size": 2000, "demonstrations.warmup.size": 200, '
    plugins, tolerance = WITHOUT_VLLM["plugins"], WITHOUT_VLLM["weight_sync"]["tolerance"]
    quick += f'"trainer.ranks": 1, "plugins": {plugins}, "weight_sync.tolerance": {tolerance}, '
    start.source = start.source.replace("**{", quick)
    resources = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=600, startup_timeout=600, resources=resources).execute()
    kinds = [output.get("data", {}).keys() for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in kind for kind in kinds), "no plot was drawn"
    assert "after=" in str(notebook.cells[5].outputs)
