"""`rayrft view` as a command: its link and key, its end, and what it refuses."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from rayrft.cli.main import main
from tests.e2e.conftest import free_port


def test_it_serves_until_it_is_interrupted_and_only_with_its_key(storage: Path, cache: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "rayrft", "view", str(storage), f"port={port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as viewer:
        assert viewer.stdout is not None
        told = re.match(r"viewer at (http://127\.0\.0\.1:\d+/); its key is in (.*)\n", viewer.stdout.readline())
        assert told is not None, "the key is not printed where it may be kept"
        key_file = Path(told[2])
        assert key_file.is_relative_to(cache) and key_file.stat().st_mode & 0o777 == 0o600
        key = key_file.read_text().strip()
        assert httpx.get(f"{told[1]}v1/runs").status_code == 401
        found = httpx.get(f"{told[1]}v1/runs", headers={"Authorization": f"Bearer {key}"}).json()
        assert {run["run"] for run in found["runs"]} == {"words", "other", "fresh"}
        viewer.send_signal(signal.SIGINT)
        assert viewer.wait(60) == 128 + signal.SIGINT


READS = """
import sys
from pathlib import Path
from rayrft.config import load_folder_config
from rayrft.feedback.run_rows import RunRows
from rayrft.viewer.index import RowIndex

folder = Path(sys.argv[1])
index = RowIndex(folder)
index.update(60.0)
assert index.about()["rows"] and RunRows(folder, load_folder_config(folder), None, 9, "edited").groups()
assert "torch" not in sys.modules
"""


def test_pages_read_a_run_without_torch_which_takes_a_second_to_import(storage: Path, cache: Path) -> None:
    subprocess.run([sys.executable, "-c", READS, str(storage / "words")], check=True)


def test_what_it_cannot_serve_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["rayrft", "view", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        [line] = capsys.readouterr().err.splitlines()
        assert ended.value.code == 1
        return line

    assert "there is no such folder" in refused(str(tmp_path / "none"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "give another one" in refused(str(tmp_path), f"port={taken.getsockname()[1]}").lower()
    assert "give keys_file or keys_env" in refused(str(tmp_path), "host=0.0.0.0").lower()
    assert "prt" in refused(str(tmp_path), "prt=1")
