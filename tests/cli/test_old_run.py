"""A run folder that an older rayrft wrote is read, or refused in one line that says what to do."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

import pytest

from rayrft.cli.main import main
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def old_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that commit 190fe5b wrote and that was killed: see tests/samples."""
    folder = tmp_path_factory.mktemp("runs")
    with tarfile.open(ROOT / "tests" / "samples" / "run_of_190fe5b.tar.gz") as packed:
        packed.extractall(folder, filter="data")
    return folder / "old"


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Call the command line; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["rayrft", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_its_status_is_read(old_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "status", str(old_run)) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["status"], status["step"]) == ("killed", 5)


@pytest.mark.parametrize(
    "command",
    [
        "data stats RUN",
        "data head RUN",
        "data show RUN row",
        "data export RUN OUT.parquet",
        "data tasks RUN OUT.parquet",
        "data feedback export RUN OUT.jsonl",
        "export RUN --to OUT",
        "resume RUN",
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(
    command: str, old_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command.replace("OUT", str(tmp_path / "out")).split()
    assert call(monkeypatch, *[str(old_run) if word == "RUN" else word for word in words]) == 1
    [refused] = capsys.readouterr().err.splitlines()
    assert refused.startswith("error: ") and "version" in refused and ". Use the version" in refused
    assert not list(tmp_path.iterdir()), "nothing was written"
