"""A folder is the old one or the new one, whenever its writer is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayrft.files import atomic_folder


def write(folder: Path, text: str) -> None:
    with atomic_folder(folder) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "file").write_text(text)


def test_a_folder_appears_whole_in_the_place_of_the_one_before_it(tmp_path: Path) -> None:
    for text in ("old", "new"):
        write(tmp_path / "model", text)
        assert (tmp_path / "model" / "inner" / "file").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_fails_halfway_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    write(tmp_path / "model", "old")
    with pytest.raises(KeyError), atomic_folder(tmp_path / "model") as partial:
        (partial / "file").write_text("half")
        raise KeyError
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["inner"]


@pytest.mark.parametrize("renames", [0, 1])
def test_killed_before_any_rename_the_old_one_is_whole_and_the_next_write_clears_up(
    renames: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "model", "old")
    rename, left = Path.rename, [renames]

    class Killed(BaseException):
        pass

    def mortal(path: Path, to: Path) -> Path:
        if not left[0]:
            raise Killed
        left[0] -= 1
        return rename(path, to)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Path, "rename", mortal)
        write(tmp_path / "model", "new")
    assert (tmp_path / (".model.old" if renames else "model") / "inner" / "file").read_text() == "old"
    write(tmp_path / "model", "newest")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "inner" / "file").read_text() == "newest"
