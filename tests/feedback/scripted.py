"""A run for the page that is kept in a folder, so that tests can look into it and end it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rayrft.config.serve import FeedbackConfig
from rayrft.errors import DataError, FeedbackRefused, RunNotFound
from rayrft.feedback.app import FeedbackPage
from rayrft.feedback.items import ShownAnswer, ShownGroup
from rayrft.feedback.judgements import Judgement
from rayrft.feedback.run_rows import RunRows
from rayrft.runtime.serving import key_digest

KEY = "sk-right"


def answer(name: str, text: str, reward: float | None = 0.5, **changes: Any) -> ShownAnswer:
    turns = ({"role": "user", "content": f"Question {name.partition('/')[0]}?"}, {"role": "assistant", "content": text})
    values = {
        "turns": turns,
        "reward_components": {"format": 1.0},
        "error": None,
        "stop_reason": "stop",
        "waiting": True,
        "logprob": -1.0,
    }
    return ShownAnswer(name, reward=reward, **{**values, **changes})


def group(name: str, *texts: str, **changes: Any) -> ShownGroup:
    answers = tuple(answer(f"{name}/{at}", text, **changes) for at, text in enumerate(texts))
    return ShownGroup(name, f"task-{name}", answers)


class ScriptedRows(RunRows):
    """``groups`` of a run that is running while ``<folder>/running`` exists; what it is told is in ``told.jsonl``."""

    def __init__(self, folder: Path, groups: list[ShownGroup]) -> None:
        self.folder, self.found = folder, groups
        self.on_feedback: Callable[[str], object] = lambda row: None

    def running(self) -> bool:
        return (self.folder / "running").exists()

    def groups(self) -> list[ShownGroup]:
        return self.found

    def find(self, experience_id: str) -> ShownAnswer:
        for group in self.found:
            for each in group.answers:
                if each.experience_id == experience_id:
                    return each
        raise DataError("no row of this id is in the log", field="experience_id", value=experience_id)

    def references(self) -> dict[str, str]:
        return {group.task_id: f"reference of {group.group_id}" for group in self.found}

    def feedback(self, experience_id: str, reward: float | None, labels: dict[str, str]) -> None:
        self.on_feedback(experience_id)
        self._tell({"row": experience_id, "reward": reward, "labels": labels})
        if self.find(experience_id).stop_reason == "late":
            raise FeedbackRefused("the row was taken for the step after version 3", field=experience_id, value=3)

    def demonstrate(self, judgement: Judgement) -> str:
        self._tell({"edit": judgement.edit, "id": judgement.id})
        return f"human/{judgement.id}"

    def withdraw(self, demonstration: str) -> None:
        self._tell({"withdrawn": demonstration})

    def told(self) -> list[dict[str, Any]]:
        path = self.folder / "told.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _tell(self, what: dict[str, Any]) -> None:
        if not self.running():
            raise RunNotFound("the run is not running", field="run")
        with (self.folder / "told.jsonl").open("a") as file:
            file.write(json.dumps(what) + "\n")


def page(folder: Path, groups: list[ShownGroup], **settings: Any) -> FeedbackPage:
    """A page over scripted groups, whose journal is in the same folder."""
    config = FeedbackConfig(labels=["polite", "wrong"], **settings)
    return FeedbackPage("demo", config, (key_digest(KEY),), ScriptedRows(folder, groups), folder)
