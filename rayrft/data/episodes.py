"""Tasks to act on in environments: maps and starts of Gymnasium, rows of `verifiers` environments."""

from __future__ import annotations

import json
import signal
import threading
from typing import TYPE_CHECKING, Any

from rayrft.config.base import resolved
from rayrft.errors import DataError
from rayrft.experience import Task
from rayrft.registry import check_installed

if TYPE_CHECKING:
    from rayrft.config.tasks import TaskSourceConfig

ROW_FIELDS = ("prompt", "example_id", "task", "answer", "info")
"""Fields of a `verifiers` row that a task keeps in its metadata."""


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
        remedy = "see gymnasium.pprint_registry()"
        raise DataError(str(error), remedy, field=f"{field}.dataset", value=id) from None
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
    """Read the training rows of a `verifiers` environment, for environment `verifiers`; ``options`` are its arguments.

    A task is a row: its question is the text of the prompt, and its metadata the row.
    """
    id = str(config.dataset)
    check_installed("verifiers", "pip install 'rayrft[verifiers]'", DataError, f"{field}.source", id)
    module = id.replace("-", "_").split("/")[-1]
    remedy = "install the environment's package (prime env install …)"
    check_installed(module, remedy, DataError, f"{field}.dataset", id)
    import verifiers

    # An environment takes these signals for itself, which a main thread alone can do.
    taken = [signal.SIGINT, signal.SIGTERM] if threading.current_thread() is threading.main_thread() else []
    handlers = {number: signal.getsignal(number) for number in taken}
    try:
        rows = verifiers.load_environment(id, **resolved(config.options)).get_dataset(n=config.size or -1).to_list()
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"verifiers cannot load it: {error}", field=f"{field}.dataset", value=id) from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return [
        Task.create(
            f"verifiers/{id}",
            "\n\n".join(_text(message["content"]) for message in row["prompt"] if message["role"] != "system"),
            _text(row.get("answer") or ""),
            metadata={name: row[name] for name in ROW_FIELDS if name in row},
        )
        for row in rows
    ]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
