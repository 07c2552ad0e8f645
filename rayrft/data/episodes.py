"""Tasks to act on in environments: maps and starts of Gymnasium, tasks of verifiers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayrft.config.base import resolved
from rayrft.data import verifiers_host
from rayrft.errors import DataError
from rayrft.experience import Task
from rayrft.registry import check_installed
from rayrft.runtime.processes.pool import environment

if TYPE_CHECKING:
    from rayrft.config.tasks import TaskSourceConfig


def read_gymnasium(config: TaskSourceConfig, field: str) -> list[Task]:
    """Make tasks for environment `gymnasium`: random maps of FrozenLake that can be crossed, or else episodes' seeds.

    ``options`` of FrozenLake are those of ``generate_random_map``: ``size`` of the map, and ``p`` of ice. Equal maps,
    and seeds that start in the same state, are duplicates, so that held-out tasks differ from those trained on.
    """
    check_installed("gymnasium", "pip install 'rayrft[gymnasium]'", DataError, f"{field}.source", config.source)
    import gymnasium

    id, size = str(config.dataset), config.size or 0
    try:
        if id.startswith("FrozenLake"):
            from gymnasium.envs.toy_text.frozen_lake import generate_random_map

            maps = [generate_random_map(**{"size": 4, **resolved(config.options)}, seed=seed) for seed in range(size)]
            return [_episode(config, id, "\n".join(desc), {"desc": desc}) for desc in maps]
        env = gymnasium.make(id, disable_env_checker=True, **resolved(config.options))
    except gymnasium.error.Error as error:
        raise DataError(str(error), "see gymnasium.pprint_registry()", field=f"{field}.dataset", value=id) from None
    except TypeError as error:
        raise DataError(f"Gymnasium refuses the options: {error}", field=f"{field}.options") from None
    starts = [env.reset(seed=seed)[0] for seed in range(size)]
    env.close()
    first: dict[str, int] = {}
    seeds = [first.setdefault(str(start), seed) for seed, start in enumerate(starts)]
    return [_episode(config, id, f"start {start}", {"seed": seed}) for seed, start in zip(seeds, starts, strict=True)]


def _episode(config: TaskSourceConfig, id: str, start: str, own: dict[str, Any]) -> Task:
    metadata = {"environment": {"id": id, **own}}
    return Task.create(f"gymnasium/{id}", f"{id}\n{start}", "", system=config.system, metadata=metadata)


def read_verifiers(config: TaskSourceConfig, field: str) -> list[Task]:
    """List the tasks of a verifiers taskset, for workflow `verifiers`.

    ``options`` has the ``python`` of the environment in which it is installed, and the options of the taskset.

    A task's question is the text of its prompt; its metadata is the task as the library has it.
    """
    options, id = resolved(config.options), str(config.dataset)
    python = options.pop("python", None)
    if not isinstance(python, str):
        remedy = "give the Python of the environment in which verifiers is installed"
        raise DataError("is required", remedy, field=f"{field}.options.python", value=python)
    found = verifiers_tasks(python, {"taskset": {"id": id, **options}}, config.size, field)
    asked = [(each["prompt"] or each["key"], {"verifiers": each["task"]}) for each in found]
    return [Task.create(f"verifiers/{id}", text, "", metadata={"environment": own}) for text, own in asked]


def verifiers_tasks(python: str, settings: dict[str, Any], size: int | None, field: str) -> list[dict[str, Any]]:
    """Return the first ``size`` tasks of an environment as `verifiers_host` lists them. ``settings`` are the library's.

    Raises DataError if they cannot be listed.
    """
    order = json.dumps({"environment": settings, "tasks": size}) + "\n"
    command, variables = host_command(python)
    try:
        listed = subprocess.run(command, input=order, capture_output=True, text=True, env=variables)
    except OSError as error:
        problem, remedy = f"the Python of verifiers cannot be started: {error.strerror}", "give the path of a Python"
        raise DataError(problem, remedy, field=field, value=python) from None
    *found, last = [json.loads(line) for line in listed.stdout.splitlines()] or [{"problem": listed.stderr[-500:]}]
    if "end" not in last:
        problem = last.get("problem") or f"the process of verifiers ended with status {listed.returncode}"
        raise DataError(problem, "see that the environment's package is installed there", field=field, value=python)
    return found


def host_command(python: str) -> tuple[list[str], dict[str, str]]:
    """Return the command of `verifiers_host`, and its environment variables, in which other programs of that Python's
    environment are found."""
    variables, folder = environment(), str(Path(python).parent.absolute())
    return [python, verifiers_host.__file__], {**variables, "PATH": f"{folder}:{variables.get('PATH', '')}"}
