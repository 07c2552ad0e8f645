"""Processes that start at once: forked from one that has imported torch and the rest, which takes seconds each time."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import DupFd
from types import SimpleNamespace
from typing import Any
from unittest import mock

FORKS: Any = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.core.resumable", "transformers.models.qwen3.modeling_qwen3"])


@contextmanager
def forked_templates() -> Iterator[None]:
    """Fork the templates of process pools: what an object does in its process does not depend on that."""
    from rayrft.runtime.processes import pool

    ours = SimpleNamespace(Popen=_Template, DEVNULL=subprocess.DEVNULL)
    with mock.patch.object(pool, "subprocess", ours):
        yield


class _Template:
    """A template in place of its `subprocess.Popen`."""

    def __init__(self, command: list[str], *, pass_fds: tuple[int, ...], env: dict[str, str], **_: Any) -> None:
        path, arguments = json.loads(command[3]), [_Fd(fd) for fd in pass_fds]
        self._process = FORKS.Process(target=_run_template, args=(path, env, *arguments), daemon=True)
        self._process.start()

    def wait(self) -> int | None:
        self._process.join()
        code: int | None = self._process.exitcode
        return code


class _Fd:
    """A file descriptor, which a process that is started gets as a number of its own."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return _detach, (DupFd(self._number),)


def _detach(given: Any) -> int:
    number: int = given.detach()
    return number


def _run_template(path: list[str], environment: dict[str, str], control: int, blueprint: int) -> None:
    from rayrft.runtime.processes.template import main

    gc.freeze()  # collecting what is there takes longer than most pipelines
    os.setsid()
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)
    main(control, blueprint)
