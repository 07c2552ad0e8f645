"""Runs that are sick, and healthy ones, as evidence and as run folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from rayrft.viewer.advisories import Evidence
from tests.viewer.recorded import RecordedRun

STEPS, GROUPS, ROWS = 40, 4, 4
_MAP = pa.map_(pa.string(), pa.float32())
SCHEMA = pa.schema(
    {
        "source": pa.string(),
        "version": pa.int64(),
        "step": pa.int64(),
        "group_id": pa.string(),
        "group_rows": pa.int32(),
    }
    | {"group_deviation": pa.float64(), "reward": pa.float64(), "tokens": pa.int32(), "turns": pa.int32()}
    | {
        "experience_id": pa.string(),
        "stop_reason": pa.string(),
        "group_status": pa.string(),
        "drop_reason": pa.string(),
        "components": _MAP,
        "metrics": _MAP,
    }
)
Steps = Callable[[float], dict[str, Any]]
Row = Callable[[float, int], dict[str, Any]]


def planted(
    steps: Steps = lambda done: {}, row: Row = lambda done, number: {}, restarts: int = 0, accuracy: Any = None
) -> Evidence:
    """A run that learns, but for fields of its steps, by the share of the run that is done, fields of its rows, by
    their number in the group, too, deaths every so many steps, and its held-out accuracy."""
    chance = np.random.default_rng(0)
    columns = [dict[str, Any]() for _ in range(STEPS)]
    rows: list[dict[str, Any]] = []
    for step in range(STEPS):
        done, sampled = step / (STEPS - 1), list[dict[str, Any]]()
        for group in range(GROUPS):
            made = []
            for number in range(ROWS):
                right = float(chance.random() < 0.2 + 0.6 * done)
                plain = {"reward": right, "tokens": 50, "turns": 5, "stop_reason": "stop", "drop_reason": None}
                parts = {
                    "components": {"right": right},
                    "metrics": {},
                    "experience_id": f"it's {step}/{group}/{number}",
                }
                made.append({**plain, **parts, **row(done, number)})
            of_group = {
                "source": "usual",
                "version": step,
                "step": step + 1,
                "group_id": f"{step}/{group}",
                "group_rows": ROWS,
                "group_status": "trained",
            }
            of_group["group_deviation"] = float(np.std([each["reward"] for each in made]))
            sampled += [of_group | each for each in made]
        rows += [each | {name: [*each[name].items()] for name in ("components", "metrics")} for each in sampled]
        columns[step] = {"step": step + 1, "version": step + 1, "usual_rows": len(sampled), "skipped_updates": 0}
        columns[step] |= {"reward": np.mean([each["reward"] for each in sampled]), "truncated_share": 0.05}
        columns[step] |= {"entropy": 1.3 - 0.8 * done, "kl": 0.02 * done, "clip_fraction": 0.02, "logprob_gap": 4e-3}
        columns[step] |= {"grad_norm": 0.6, "lr": 1e-5, **steps(done)}
    connection = duckdb.connect()
    connection.register("given", pa.Table.from_pylist(rows, SCHEMA))
    connection.execute("create table answers as select * from given")
    deaths = range(0, STEPS, restarts) if restarts else []
    held_out = accuracy or (lambda done: 0.2 + 0.6 * done)
    return Evidence(
        {name: np.array([each.get(name, np.nan) for each in columns]) for name in columns[0]},
        [{"accuracy": held_out(number / 4)} for number in range(5)],
        [{"kind": "restart", "text": "engine-0 restarted", "step": step} for step in deaths],
        connection,
        [rows[0]["experience_id"]],
    )


def flat(done: float, number: int) -> dict[str, Any]:
    """One of the answers to each task is right, from the beginning to the end."""
    return {"reward": float(number == 0)}


def tools(calls: Callable[[float], float], errors: float = 0.0) -> Row:
    return lambda done, number: (
        flat(done, number) | {"metrics": {"tool_calls": calls(done), "tool_errors": errors * calls(done)}}
    )


SECTIONS = "weight_sync|optimizer|reward|explorer|tasks|checkpoint|model|update|trainer|algorithm"
KEYS = rf"\b(?:{SECTIONS})\.[a-z_.]+[a-z]|max_staleness"
OPPOSED = ({"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 1.0})
SICK: dict[str, dict[str, Any]] = {
    "Engine and trainer disagree": {"steps": lambda done: {"logprob_gap": 0.3, "truncated_share": 0.6}, "row": flat},
    "Updates are skipped": {"steps": lambda done: {"skipped_updates": 1, "clip_fraction": 0.6}, "row": flat},
    "Rewards are unknown": {
        "steps": lambda done: {"lost: reward_unknown": 8},
        "row": lambda done, number: {"reward": 0.0},
    },
    "Attempts fail": {"steps": lambda done: {"lost: timeout": 6, "lost: environment_error": 3}, "row": flat},
    "Answers come too late": {"steps": lambda done: {"lost: stale": 12, "entropy": 0.01}, "row": flat},
    "Parts restart again and again": {"restarts": 3, "row": flat},
    "Answers are cut": {
        "steps": lambda done: {"truncated_share": 0.6},
        "row": lambda done, number: flat(done, number) | {"stop_reason": "length" if number else "stop"},
    },
    "Answers are not understood": {
        "row": lambda done, number: flat(done, number) | {"components": {"parsed": float(number == 0)}}
    },
    "Tool calls fail": {"row": tools(lambda done: 2.0, 0.7)},
    "Tools are called less and less": {"row": tools(lambda done: 2.0 * (1 - done))},
    "Parts of the reward contradict each other": {
        "row": lambda done, number: flat(done, number) | {"components": OPPOSED[number % 2]}
    },
    "Tasks are memorised": {"accuracy": lambda done: 0.5 - 0.3 * done},
    "Nothing tells answers apart": {"row": lambda done, number: {"reward": 0.0}},
    "The policy has collapsed": {"steps": lambda done: {"entropy": 1.2 * 0.01**done}, "row": flat},
    "Answers drift in length": {"row": lambda done, number: flat(done, number) | {"tokens": int(50 + 150 * done)}},
    "Steps are too large": {"steps": lambda done: {"clip_fraction": 0.5}, "row": flat},
    "Steps are too small": {"steps": lambda done: {"entropy": 1.2, "kl": 1e-6, "lr": 1e-9}, "row": flat},
}
DROPPED = {"reward": 0.0, "group_status": "dropped", "drop_reason": "zero_variance"}
ALL_FAIL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Answers are cut": ({"truncated_share": 0.9}, {"stop_reason": "length"}),
    "Answers are not understood": ({}, {"components": {"parsed": 0.0}}),
    "Tool calls fail": ({}, {"metrics": {"tool_calls": 2.0, "tool_errors": 1.4}}),
}
"""Fields of steps and of answers, of which each fails and whose groups are dropped."""
HEALTHY: dict[str, dict[str, Any]] = {
    "it learns": {},
    "it is solved": {"row": lambda done, number: {"reward": 1.0}},
    "it uses tools": {"row": lambda done, number: {"metrics": {"tool_calls": 1.0 + done, "tool_errors": 0.1}}},
    "two actors died": {"restarts": 20},
    "some answers are cut or late": {"steps": lambda done: {"truncated_share": 0.4 - 0.2 * done, "lost: stale": 2}},
    "it gets sure of itself": {"steps": lambda done: {"entropy": 1.3 * 0.02**done}},
}


def sick_run(storage: Path, cause: str) -> None:
    """Write the run folder of a run with this trouble."""
    settings = SICK[cause]

    def row(done: float, number: int) -> dict[str, Any]:
        fields = settings["row"](done, number) if "row" in settings else {}
        return {NAMES.get(name, name): value for name, value in fields.items()}

    run = RecordedRun(storage, planted=(settings.get("steps", lambda done: {}), row), planned=20)
    for step in range(20):
        run.train()
        if "restarts" in settings and step % settings["restarts"] == 0:
            run.restart("its process died")
    run.finish()
    run.close()


NAMES = {"components": "reward_components"}
