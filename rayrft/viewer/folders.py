"""The run folders in a storage, each with its records and its rows."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rayrft.config import RunConfig
from rayrft.data.task_splits import COUNTS, TASKS_FILE
from rayrft.errors import RayrftError, nearest
from rayrft.experience import json_digest
from rayrft.explorer.unstored import ANSWERS
from rayrft.monitor.summary import Summary, read_summary
from rayrft.runtime.serving.http import ApiError
from rayrft.viewer.index import RowIndex
from rayrft.viewer.records import RecordTable

Reports = Mapping[str, Callable[[RunConfig], Sequence[Any]]]

_LEDGER_S = 0.2
"""Seconds that the status of a running run waits for its log; without it the ledger is the one read before."""
_SILENT_S = 600.0
"""A run without a summary that has written nothing for so long counts as silent: it was killed, or hangs."""


class RunFolder:
    """One run. Its methods may be called in any thread."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        self.table = RecordTable(path)
        """The records as they were read last."""

    @cached_property
    def rows(self) -> RowIndex:
        return RowIndex(self.path)

    @property
    def config(self) -> dict[str, Any]:
        """The config as it is in the folder, unchecked: another release may have written it, with plug-ins."""
        try:
            loaded = yaml.safe_load((self.path / "config.yaml").read_text())
        except (OSError, yaml.YAMLError):
            return {}
        return loaded if isinstance(loaded, dict) else {}

    def task_sources(self) -> dict[str, str]:
        """Return the name of its source by the id of a training task; empty if there is one source alone."""
        tasks = self.config.get("tasks")
        sources = tasks.get("sources") if isinstance(tasks, dict) else None
        if not isinstance(sources, list) or len(sources) < 2 or not all(isinstance(each, dict) for each in sources):
            return {}
        try:
            ids = json.loads((self.path / TASKS_FILE).read_text())
            counts = [int(count) for count in ids[COUNTS]]
        except (OSError, ValueError, KeyError, TypeError):  # another release wrote it
            return {}
        names = [
            str(each.get("name") or each.get("dataset") or each.get("path") or number)
            for number, each in enumerate(sources)
        ]
        of_task = [name for name, count in zip(names, counts, strict=False) for _ in range(count)]
        return dict(zip(ids["training"], of_task, strict=False))

    def records(self) -> RecordTable:
        """Return the records as they are now. Raises StorageError if the file is damaged."""
        self.table.update()
        return self.table

    def seen(self) -> str:
        """Return the digest of the files that views are made of, and of the rows that were read of them."""
        found = [(file, about.st_ino, about.st_size, about.st_mtime_ns) for file, about in self._files()]
        return f"{json_digest(found)}-{self.rows.generation if 'rows' in self.__dict__ else 0}"

    @property
    def watched(self) -> list[Path]:
        """The folders whose files change while the run is running."""
        log = self.rows.log if "rows" in self.__dict__ else None
        return [self.path, *(each for each in (log, self.path / ANSWERS) if each is not None and each.is_dir())]

    def status(self) -> dict[str, Any]:
        """Return the run's status as its files tell it, with ``problems`` of files that cannot be read."""
        records, problems = self.table, list[str]()
        summary: Summary | None = None
        try:
            records.update()
        except RayrftError as error:
            problems.append(str(error))
        try:
            summary = read_summary(self.path)
        except ValidationError as error:
            problems.append(f"{self.path / 'summary.json'}: cannot be read: {error.errors()[0]['msg']}")
        config, changed = self.config, max((about.st_mtime for _, about in self._files()), default=0.0)
        stages = [each for each in config.get("stages") or () if isinstance(each, dict)]
        silent = time.time() - changed > _SILENT_S
        about: dict[str, Any] = {
            "run": self.name,
            "status": summary.status if summary else "silent" if silent else "running",
            "error": summary.error if summary else None,
            "stage": records.stage,
            "stages": [str(each.get("name")) for each in stages],
            "steps_planned": sum(int(each.get("steps") or 0) for each in stages),
            "step": int(records.latest("step") or 0),
            "version": int(records.latest("version") or 0),
            "changed": changed,
            "seconds": summary.seconds.get("total") if summary else None,
            "ledger": asdict(summary.ledger) if summary and summary.ledger else None,
            "verdict": "",
            "problems": problems,
        }
        if about["status"] == "running":
            self.rows.update(_LEDGER_S)
        if summary is None and "rows" in self.__dict__:
            about["ledger"] = self.rows.about()["ledger"]
        explores = config.get("mode", "both") == "both"
        try:
            about["verdict"] = records.verdict(int(config.get("max_staleness") or 0), explores=explores)
        except (ValueError, TypeError):  # another release wrote the records
            problems.append("metrics.jsonl: another release of rayrft wrote the records, so there is no verdict")
        return about

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        """Iterate over the names of the files that views are made of, and what is known of each."""
        files = [self.path / name for name in ("metrics.jsonl", "summary.json", "config.yaml")]
        for file in [*files, *(file for folder in self.watched[1:] for file in sorted(folder.iterdir()))]:
            with contextlib.suppress(FileNotFoundError):
                yield file.name, file.stat()


class Runs:
    """The runs in a storage, or the one in a run folder; ``reports`` on a config, by name."""

    def __init__(self, storage: Path, reports: Reports | None = None) -> None:
        self.storage, self.reports = storage, reports or {}
        self._known: dict[Path, RunFolder] = {}
        self._lock = threading.Lock()

    def all(self) -> list[RunFolder]:
        """Return the runs by name."""
        single = (self.storage / "config.yaml").is_file()
        found = [self.storage.resolve()] if single else [path.parent for path in self.storage.glob("*/config.yaml")]
        with self._lock:
            self._known = {path: self._known.get(path) or RunFolder(path) for path in sorted(found)}
            return list(self._known.values())

    def get(self, name: str) -> RunFolder:
        """Return a run. Raises ApiError 404 for an unknown name."""
        runs = {run.name: run for run in self.all()}
        if name not in runs:
            hint = nearest(name, runs) if runs else f"there are none in {self.storage}"
            raise ApiError(404, f"There is no run {name!r}; {hint}", code="run_not_found", param="run")
        return runs[name]
