"""Layouts of rows: the columns in which data sets hold tasks, conversations, answers and preference pairs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from string import ascii_uppercase
from typing import Any

from rayrft.config.demonstrations import RowFormat
from rayrft.data.formats import CsvRow, answer_text, as_text, value_at
from rayrft.errors import DataError

TRUTH = "answer|ground_truth|final_answer|reference_answer|target|solution|answerKey"
"""Columns of right answers."""
_SYSTEM = {"system": "system|system_prompt?"}
_CHOICES = {"choices": "choices.text|choices|options?", "labels": "choices.label?"}
_COMPLETION = {"prompt": "prompt", "response": "completion", **_SYSTEM}
_PAIR = {"chosen": "chosen", "rejected": "rejected"}
_CONTENT = (
    *("system", "system_prompt", "input", "context", "passage", "article", "document", "hint", "history", "tools"),
    *("choices", "options", "image", "images", "video", "videos", "audio", "audios"),
)
"""Columns that carry content: a recognised layout either reads such a column of a row, or refuses the row."""


@dataclass(frozen=True)
class RowLayout:
    """A layout: for each value that rayrft reads, the column that holds it.

    A column is a dotted path. ``a|b`` is the first of these that a row has, ``a + b`` their texts with a blank line
    between, and a ``?`` at the end marks a column that a row may lack.
    """

    name: str
    columns: Mapping[str, str]
    plain: bool = False
    """Whether texts are tokenised as they are, as TRL does, and not as messages of a chat."""
    also: tuple[str, ...] = ()
    """Other columns that a row of the layout has."""

    @property
    def required(self) -> list[str]:
        """The columns that every row has."""
        return [*self.also, *(spec for spec in self.columns.values() if not spec.endswith("?"))]

    def missing(self, row: Mapping[str, Any]) -> list[str]:
        """Return the columns that a row lacks."""
        return [spec for spec in self.required if not _present(row, spec)]

    def read(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row's values by name; None where it has none. Choices and earlier turns become part of the prompt,
        and the number of the right choice its letter."""
        values = {name: _value(row, spec) for name, spec in self.columns.items()}
        asked, answer = ("question", "answer") if "question" in values else ("prompt", "response")
        choices, labels = values.pop("choices", None), values.pop("labels", None)
        if choices:
            question = as_text(values[asked], self.column(row, asked))
            values[asked], values[answer] = _multiple_choice(question, choices, labels, values[answer])
        if history := values.pop("history", None):
            values[asked] = [*_earlier_turns(history), {"role": "user", "content": values[asked]}]
        return values

    def check_content(self, row: Mapping[str, Any], read: Collection[str]) -> None:
        """Raise DataError for a column of content that is neither one of ``read`` nor a column of the layout."""
        columns = {name.partition(".")[0] for spec in self.columns.values() for name in _present(row, spec)}
        for name in _CONTENT:
            if name not in columns and name not in read and row.get(name) not in (None, "", []):
                remedy = "remove the column, or name in the config the columns to read"
                raise DataError(f"the layout {self.name!r} does not read {name!r}", remedy)

    def column(self, row: Mapping[str, Any], name: str) -> str:
        """Return the column or columns of the row that hold a value; what they may be if it has none."""
        return " + ".join(_present(row, self.columns[name])) or self.columns[name].removesuffix("?")

    def shown(self, row: Mapping[str, Any], plain: bool = False) -> str:
        """Return the layout's name, and which of the row's columns are read as what."""
        found = {name: _present(row, spec) for name, spec in self.columns.items()}
        columns = ", ".join(f"{' + '.join(names)} → {name}" for name, names in found.items() if names)
        return f"{self.name}{', texts without chat template' if plain else ''}: {columns}"


def _present(row: Mapping[str, Any], spec: str) -> list[str]:
    """Return the columns of ``spec`` that a row has."""
    found = ([name for name in names if value_at(row, name) is not None] for names in _options(spec))
    return next(filter(None, found), [])


@cache
def _options(spec: str) -> list[list[str]]:
    return [part.split(" + ") for part in spec.removesuffix("?").split("|")]


def _multiple_choice(question: str, choices: Any, labels: Any, answer: Any) -> tuple[str, Any]:
    """Return a question with its choices as lines with letters, unless it has them, and the letters of its answers."""
    if isinstance(choices, dict):
        labels, choices = [*choices], [*choices.values()]
    if not isinstance(choices, list) or len(choices) > len(ascii_uppercase):
        raise DataError("'choices' is not a list of at most 26 texts")
    if not isinstance(labels := labels or [*ascii_uppercase[: len(choices)]], list) or len(labels) != len(choices):
        raise DataError("the labels are not a list of as many as there are 'choices'")
    texts = [re.sub(r"^\s*(?:\([A-Z]\)|[A-Z][).:、])\s*", "", answer_text(each, "choices")) for each in choices]
    lines = dict(zip(ascii_uppercase, texts, strict=False))
    if not all(re.search(rf"{letter}[).:、]\s*{re.escape(text)}", question) for letter, text in lines.items()):
        question = "\n".join([question, *(f"{letter}. {text}" for letter, text in lines.items())])
    known = [*labels, *choices, *texts]
    if isinstance(answer, list):
        return question, [_letter(each, known, len(choices)) for each in answer]
    return question, _letter(answer, known, len(choices))


def _letter(answer: Any, known: list[Any], count: int) -> Any:
    """Return the letter of an answer, which is one of the ``known`` names of choices or a number from 0; another text
    stays."""
    if answer in known:
        return ascii_uppercase[known.index(answer) % count]
    if not isinstance(answer, int | float) and not str(answer).isdigit():
        return answer
    if isinstance(answer, bool | str) or answer not in range(count):
        raise DataError(f"the answer {answer!r} is not a number from 0 of its {count} choices", "give a letter")
    return ascii_uppercase[int(answer)]


def _earlier_turns(history: Any) -> list[dict[str, Any]]:
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise DataError("'history' is not a list of pairs of a question and its answer")
    roles = "user", "assistant"
    return [{"role": role, "content": text} for pair in history for role, text in zip(roles, pair, strict=True)]


def _value(row: Mapping[str, Any], spec: str) -> Any:
    names = _present(row, spec)
    values = [value_at(row, name) for name in names]
    if isinstance(row, CsvRow):
        values = [answer_text(value, name) for value, name in zip(values, names, strict=True)]
    if len(names) > 1:
        return "\n\n".join(text for value, name in zip(values, names, strict=True) if (text := as_text(value, name)))
    return values[0] if values else None


DEMONSTRATIONS = (
    RowLayout(
        "OpenAI preference",
        {
            "prompt": "input.messages",
            "chosen": "preferred_output",
            "rejected": "non_preferred_output",
            "tools": "input.tools?",
        },
    ),
    RowLayout("ShareGPT preference", {"prompt": "conversations", **_PAIR, **_SYSTEM}),
    RowLayout("TRL preference", {"prompt": "prompt", **_PAIR, **_SYSTEM}, plain=True),
    RowLayout("question and preference", {"prompt": "question|instruction + input", **_PAIR, **_SYSTEM}),
    RowLayout("TRL preference with an implicit prompt", {"prompt": "prompt?", **_PAIR, **_SYSTEM}, plain=True),
    RowLayout("ShareGPT", {"messages": "conversations", **_SYSTEM}),
    RowLayout("chat messages", {"messages": "messages", **_SYSTEM}),
    RowLayout(
        "TRL stepwise supervision", {"prompt": "prompt", "steps": "completions", "step_labels": "labels"}, plain=True
    ),
    RowLayout("TRL unpaired preference", _COMPLETION, plain=True, also=("label",)),
    RowLayout("TRL prompt-completion", _COMPLETION, plain=True),
    RowLayout("prompt and response", {"prompt": "prompt", "response": "response", **_SYSTEM}),
    RowLayout("Alpaca", {"prompt": "instruction + input", "response": "output", "history": "history?", **_SYSTEM}),
    RowLayout("Dolly", {"prompt": "instruction + context", "response": "response", **_SYSTEM}),
    RowLayout("question and answer", {"prompt": "question", "response": "answer", **_CHOICES, **_SYSTEM}),
    RowLayout("TRL language modelling", {"text": "text"}, plain=True),
)
"""Layouts of demonstrations: of those that fit a row, the first is taken."""

TASKS = (
    RowLayout("verl", {"question": "prompt", "answer": "reward_model.ground_truth", **_SYSTEM}, also=("data_source",)),
    RowLayout("question and answer", {"question": "question", "answer": f"{TRUTH}?", **_CHOICES, **_SYSTEM}),
    RowLayout("problem and answer", {"question": "problem", "answer": f"{TRUTH}?", **_CHOICES, **_SYSTEM}),
    RowLayout("Alpaca", {"question": "instruction + input", "answer": "output", "history": "history?", **_SYSTEM}),
    RowLayout(
        "TRL prompt-completion",
        {"question": "prompt", "answer": f"{TRUTH}|completion", **_SYSTEM},
        also=("completion",),
    ),
    RowLayout("TRL prompt-only", {"question": "prompt", "answer": f"{TRUTH}?", **_SYSTEM}),
    RowLayout("ShareGPT", {"question": "conversations", "answer": f"{TRUTH}?", **_SYSTEM}),
    RowLayout("chat messages", {"question": "messages", "answer": f"{TRUTH}?", **_SYSTEM}),
)
"""Layouts of tasks, likewise."""


def recognise(row: Mapping[str, Any], layouts: Sequence[RowLayout]) -> RowLayout:
    """Return the layout of a row. Raises DataError, which names the two nearest ones, if it has none of them."""
    if found := next((layout for layout in layouts if not layout.missing(row)), None):
        return found
    lacking = [(layout.missing(row), layout) for layout in layouts]
    near = sorted(lacking, key=lambda each: (len(each[0]) - len(each[1].required), len(each[0])))[:2]
    nearest = " and ".join(f"{layout.name!r}, which needs {' and '.join(missing)}" for missing, layout in near)
    columns = ", ".join(name for name, value in row.items() if value is not None) or "none"
    problem = f"no known layout (columns: {columns}); the nearest are {nearest}"
    raise DataError(problem, "name the columns in the config")


def named_layouts(form: RowFormat) -> tuple[RowLayout, ...]:
    """Return the layouts of the columns that a config names; none if it names none."""
    names = "messages", "prompt", "response", "chosen", "rejected"
    if not any(getattr(form, name) for name in names):
        return ()
    messages, prompt, response, chosen, rejected = (getattr(form, name) or name for name in names)
    return (
        RowLayout("preference pairs", {"prompt": f"{prompt}?", "chosen": chosen, "rejected": rejected}, plain=True),
        RowLayout("chat messages", {"messages": messages}),
        RowLayout("prompt and response", {"prompt": prompt, "response": response}, plain=True),
    )
