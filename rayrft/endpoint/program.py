"""A program that calls its model by the API of OpenAI or Anthropic, such as a coding agent, as a workflow."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any, Literal

from rayrft.config.serve import History
from rayrft.endpoint import program_box
from rayrft.endpoint.agent import Applications, pool
from rayrft.endpoint.attempts import Access
from rayrft.errors import ConfigError, DataError, SandboxFailed
from rayrft.experience import Task
from rayrft.rewards.base import task_value
from rayrft.rewards.sandbox import Sandbox, SandboxLimits, bytecode
from rayrft.rewards.sandbox.isolation import ENVIRONMENT, PROGRAM_FOLDER

_BOX = ".rayrft.pyc"
_PORT = "{url}"  # filled in by the sandbox
_WITHOUT_SOCKETS = "runsc"
_ENDLESS = 1 << 30  # seconds: the attempt has a deadline


class Program(Applications):
    """Runs ``command`` in a sandbox, in a folder of its own with the files of the task's ``metadata.files`` (texts by
    path). ``{question}`` in the command, in ``stdin`` and in the values of ``environment`` is the task's question. The
    program finds the model by ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, ``ANTHROPIC_BASE_URL`` and
    ``ANTHROPIC_API_KEY``, and reaches nothing else; ``{base_url}`` and ``{api_key}`` in the command and the environment
    are those of OpenAI's API.

    The reward is that of `Applications` for what the program wrote to stdout or, with ``answer``, for the text of that
    file, where one that is missing is an empty text. With ``check``, it is 1 if that command then ends with status 0,
    else 0. The command runs in a sandbox without network, in a folder with what the program left and the files in
    ``metadata.check_files``, which the program cannot see. A task without that field fails its attempts. A program that
    ends with another status than 0 fails its attempt, unless ``status: any``. After an answer that was cut its rows are
    kept instead: with reward 0 by a ``check``, that of an empty text by ``answer``, else that of the last answer.

    ``folders`` are further folders that programs can read, beside /usr and that of Python; the command is looked for in
    their ``bin``, too. ``isolation`` is that of `Sandbox`, ``memory_mib`` the memory of a program with all that it
    starts, ``folder_mib`` the size of its folder, and ``threads`` the number of its processes and threads.
    """

    in_sandboxes = True

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: str = "",
        environment: Mapping[str, str] | None = None,
        answer: str | None = None,
        check: Sequence[str] | None = None,
        status: Literal["zero", "any"] = "zero",
        folders: Sequence[str] = (),
        isolation: str = "auto",
        memory_mib: int = 2048,
        folder_mib: int = 64,
        threads: int = 256,
        processes: int = 16,
        tool_calls: str = "auto",
        history: History = "sampled",
    ) -> None:
        for field, words in ("command", command), ("check", check if check is not None else ["/"]):
            if isinstance(words, str) or not words or not all(isinstance(word, str) for word in words):
                raise ConfigError("is not a list of words", "give [program, argument, …]", field=field, value=words)
        if status not in ("zero", "any"):
            raise ConfigError("is neither zero nor any", "choose one of them", field="status", value=status)
        if isolation == _WITHOUT_SOCKETS:
            problem, remedy = "lets no program reach its endpoint", "choose bwrap or unshare"
            raise ConfigError(problem, remedy, field="isolation", value=isolation)
        for folder in folders:
            if not os.path.isdir(folder):
                raise ConfigError("is not a folder", "give one that every node has", field="folders", value=folder)
        limits = SandboxLimits(
            wall_s=_ENDLESS,
            cpu_s=_ENDLESS,
            memory_mib=memory_mib,
            folder_mib=folder_mib,
            processes=threads,
            open_files=4096,
            output_bytes=2 * folder_mib << 20,
            address_space=False,
        )
        path = ":".join([*(f"{os.path.realpath(folder)}/bin" for folder in folders), ENVIRONMENT["PATH"]])
        given = {"PATH": path, **(environment or {})}
        sandbox = Sandbox(isolation, folders=folders, lenient=True)
        for field, words in ("command", command), ("check", check or ()):
            place = PurePosixPath(PROGRAM_FOLDER, *words[:1])
            if words and not ("/" in words[0] and place.is_relative_to(PROGRAM_FOLDER)):  # a file of the task
                _check_program(words[0], given["PATH"], sandbox, field)
        box = partial(_Box, command, stdin, given, answer, check, status, folders, isolation, limits)
        super().__init__(pool(box, processes), tool_calls, history)
        self.cut_result = 0.0 if check is not None else "" if answer is not None else None


@dataclass(frozen=True)
class _Box:
    """The program's runs, one for each attempt, in a process beside the Explorer."""

    command: Sequence[str]
    stdin: str
    environment: Mapping[str, str]
    answer: str | None
    check: Sequence[str] | None
    status: str
    folders: Sequence[str]
    isolation: str
    limits: SandboxLimits

    def run(self, task: Task, access: Access) -> float | str:
        """Return the reward, or the text that is to be scored."""
        if self.check is not None and "check_files" not in task.metadata:
            remedy = "add a column check_files, texts by path, to the tasks; {} if the check needs no files"
            raise DataError("is missing, so the check has nothing to run", remedy, field="metadata.check_files")
        variables = access.variables(_PORT)
        values = {"question": task.question, "api_key": access.key, "base_url": variables["OPENAI_BASE_URL"]}

        def filled(text: str) -> str:
            # In one pass, so that a question which holds a name is left as it is.
            return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)

        orders = {
            "command": [filled(word) for word in self.command],
            "input": filled(self.stdin),
            "files": _files(task, "files"),
            "environment": {**variables, **{name: filled(value) for name, value in self.environment.items()}},
            "socket": access.socket,
            "path": access.path,
            "keep": "." if self.check else self.answer,
        }
        said = self._in_sandbox(orders)
        if said["status"] and self.status == "zero":
            problem = f"the program ended with status {said['status']}: {said['stderr'] or said['output'][-500:]}"
            raise SandboxFailed(problem, field="command", value=self.command[0])
        if self.check is None:
            content = said["files"].get(self.answer, "")
            return said["output"].strip() if self.answer is None else base64.b64decode(content).decode(errors="replace")
        files = {**said["files"], **_files(task, "check_files")}
        checking = {**orders, "command": self.check, "input": "", "files": files, "socket": None, "keep": None}
        checking["environment"] = {"PATH": self.environment["PATH"]}
        return float(self._in_sandbox(checking)["status"] == 0)

    def _in_sandbox(self, orders: dict[str, Any]) -> dict[str, Any]:
        """Run a command to its end. Raises SandboxFailed if it cannot start, or is ended by a limit."""
        sockets = [] if orders["socket"] is None else [orders["socket"]]
        sandbox = Sandbox(self.isolation, folders=[*self.folders, *sockets], lenient=True)
        box = {_BOX: bytecode(program_box.__file__)}
        stdin = json.dumps(orders).encode() + b"\n"
        outcome = sandbox.run(box, [*sandbox.python, _BOX], stdin, self.limits)
        said = json.loads(outcome.stdout) if outcome.succeeded else {"problem": outcome.describe()}
        if "problem" in said:
            raise SandboxFailed(said["problem"], field="command", value=orders["command"][0])
        return {**said, "stderr": outcome.stderr.decode(errors="replace").strip()[-500:]}


def _check_program(program: str, path: str, sandbox: Sandbox, field: str) -> None:
    """Raise ConfigError unless a program is found in the sandbox, by its path or in ``path``."""
    look = "import shutil, sys; sys.exit(shutil.which(sys.argv[1], path=sys.argv[2]) is None)"
    if sandbox.run({}, [*sandbox.python, "-c", look, program, path]).succeeded:
        return
    problem, remedy = "there is no such program", "install it where the Explorer runs, below /usr or in `folders`"
    if found := shutil.which(program, path=path):
        problem = "programs in the sandbox do not see it"
        remedy = f"list a folder above it in `folders`, and give its real path, {os.path.realpath(found)}"
    raise ConfigError(problem, remedy, field=field, value=program)


def _files(task: Task, name: str) -> dict[str, str]:
    """Return files of a task's metadata, encoded. Raises DataError unless they are texts by paths inside a folder."""
    files: dict[str, str] = task_value(task, name, dict[str, str], {})
    for path in files:
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise DataError("is not a path inside the folder", field=f"metadata.{name}", value=path)
    return {path: base64.b64encode(text.encode()).decode() for path, text in files.items()}
