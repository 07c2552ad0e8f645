"""The wheel is whole: without the tree the package is imported, its command runs and its pages open."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGE = """
import asyncio, sys
from importlib.metadata import distributions
from pathlib import Path
import httpx
import rayrft
from rayrft.config.serve import FeedbackConfig, ViewerConfig
from rayrft.feedback.app import FeedbackPage
from rayrft.viewer.app import Viewer

feedback = FeedbackPage("demo", FeedbackConfig(), (), None, Path()).app()
viewer = Viewer(Path(), ViewerConfig(), ()).app()

async def get(app, path):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://page") as http:
        answer = await http.get(path)
        return answer.status_code, answer.headers["content-type"].partition(";")[0], len(answer.text) > 900

print(Path(rayrft.__file__).parent)
for path in ("/", "/page.js", "/store.js", "/page.css", "/base.css"):
    print(*asyncio.run(get(feedback, path)))
for path in ("/", "/page.js", "/views/experiences.js", "/uplot/uPlot.iife.min.js", "/base.js"):
    print(*asyncio.run(get(viewer, path)))
[wheel] = distributions(name="rayrft", path=[str(Path(rayrft.__file__).parents[1])])
sys.argv = ["rayrft", "--help"]
wheel.entry_points["rayrft"].load()()
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the contents of the wheel that the tree gives."""
    tree, folder = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "rayrft", tree / "rayrft", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run([*pip, "-w", str(folder), str(tree)], capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    [wheel] = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "unpacked")
    return folder / "unpacked"


def test_every_file_but_the_guides_is_in_the_wheel(unpacked: Path) -> None:
    def files(root: Path) -> set[str]:
        found = (path for path in (root / "rayrft").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {str(path.relative_to(root)) for path in found if path.suffix != ".md"}

    assert files(unpacked) == files(ROOT)


def test_the_command_and_the_pages_open_without_the_tree(unpacked: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(unpacked)}
    opened = subprocess.run(
        [sys.executable, "-c", PAGE], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert opened.returncode == 0, opened.stderr
    where, *pages = opened.stdout.splitlines()[:11]
    assert where == str(unpacked / "rayrft")
    kinds = ["text/html", "text/javascript", "text/javascript", "text/css", "text/css"]
    kinds += ["text/html", *["text/javascript"] * 4]
    assert pages == [f"200 {kind} True" for kind in kinds]
    assert "Usage: rayrft" in opened.stdout
