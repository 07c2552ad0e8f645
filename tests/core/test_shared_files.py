"""Files that all nodes must see: which ones, and what a node says of them."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rayrft.buffer.log.storage import Storage
from rayrft.config import load_config
from rayrft.core.shared_files import check_storage, find_missing, named_files
from rayrft.errors import ConfigError, StorageError
from tests.config.given import base


@pytest.mark.parametrize("key", ["storage", "buffer.storage"])
def test_a_folder_inside_a_jobs_copy_of_its_working_directory_is_refused(key: str) -> None:
    copy = "/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1/runs"
    with pytest.raises(ConfigError, match=rf"^{key}: is inside the job's copy .* storage=/shared/runs"):
        check_storage(load_config(base(), {key: copy}))
    check_storage(load_config(base(), {key: "/shared/runs"}))


def test_paths_and_hub_ids_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "plugin.py").touch()
    plugin, image = str(tmp_path / "plugin.py"), str(tmp_path / "plugin.py")
    judges = {"judge": {"model": str(tmp_path / "model")}, "other": {"model": "org/model"}}
    config = load_config(base(), {"plugins": [plugin], "auxiliary": judges})
    found = {"plugins": [plugin], "auxiliary.judge.model": [str(tmp_path / "model")], "images of tasks": [image]}
    assert named_files(config, [image, image]) == {**found, "auxiliary.other.model": ["org/model"]}


def _unknown() -> None:
    raise OSError("not cached, and the hub does not answer")


def test_a_node_sees_a_model_of_the_hub_if_it_is_cached_or_the_hub_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (marker := tmp_path / ".seen-1").touch()
    hub = mock.Mock()
    hub.AutoConfig.from_pretrained.side_effect = lambda path: {"known/model": hub}.get(path) or _unknown()
    monkeypatch.setattr("rayrft.data.models.transformers", hub)
    files = {"model.path": ["known/model"], "stages.a.teacher": ["unknown/model"]}
    assert find_missing(marker, files) == [("stages.a.teacher", "unknown/model")]


def test_a_node_names_what_it_does_not_see_and_leaves_nothing(tmp_path: Path) -> None:
    marker = tmp_path / ".seen-1"
    files = {"plugins": [str(tmp_path / "there.py"), str(tmp_path / "missing.py")]}
    (tmp_path / "there.py").touch()
    absent = [("storage", str(tmp_path)), ("plugins", str(tmp_path / "missing.py"))]
    assert find_missing(marker, files) == absent
    marker.touch()
    assert find_missing(marker, files) == absent[1:]
    assert {path.name for path in tmp_path.iterdir()} == {".seen-1", "there.py"}
    assert find_missing(Path("/proc/.seen-1"), {}) == [("storage", "/proc")], "a folder that takes no files"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(
        StorageError, match=r"lock: cannot be written or read: refused. The file system has no file locks"
    ):
        Storage(tmp_path).lock()
