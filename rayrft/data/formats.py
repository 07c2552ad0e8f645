"""File formats of rows (JSONL, CSV, Parquet, saved data sets) and the layouts of demonstrations."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayrft.config.demonstrations import RowFormat
from rayrft.errors import DataError

Row = dict[str, Any] | str
"""A row, or the reason why it cannot be parsed."""


@dataclass(frozen=True)
class SkippedRows:
    """Rows that are not trained, with the reason, by number from 1: lines of a JSONL file, rows of other sources."""

    excluded: dict[int, str] = field(default_factory=dict)
    """Valid rows that a rule excludes."""
    broken: dict[int, str] = field(default_factory=dict)
    """Invalid rows."""

    def __len__(self) -> int:
        return len(self.excluded) + len(self.broken)

    @property
    def counts(self) -> Counter[str]:
        """Number of rows by reason; the reason of broken rows lists the first ten of them."""
        counts = Counter(self.excluded.values())
        if self.broken:
            first = ", ".join(map(str, sorted(self.broken)[:10])) + (", …" if len(self.broken) > 10 else "")
            counts[f"broken (lines {first})"] = len(self.broken)
        return counts


def read_rows(path: Path, field: str) -> Generator[tuple[int, Row], None, None]:
    """Iterate over the rows of a file or folder with their numbers, from 1: lines of a JSONL file, rows of any other.

    Files of a folder are all of one kind. Values of CSV are texts, numbers where they are written like one, and none
    where they are empty.

    Rows of several files are numbered consecutively, by file name (in a saved data set: in its order). Raises
    DataError, which names ``field``, if the file is missing or unreadable.
    """
    if not path.exists():
        raise DataError(
            "no such file",
            field=field,
            value=str(path),
            remedy="give a JSONL, CSV or Parquet file, a folder of such files, or a saved Hugging Face data set",
        )
    try:
        lines = sorted(path.glob("*.jsonl")) or sorted(path.glob("*.csv")) if path.is_dir() else []
        if lines:
            yield from enumerate((row for file in lines for _, row in _lines(file)), start=1)
        elif path.is_dir() or path.suffix == ".parquet":
            yield from enumerate(_table_rows(path, field), start=1)
        else:
            yield from _lines(path)
    except (pa.ArrowException, OSError) as error:
        problem = f"cannot be read: {str(error).splitlines()[0]}"
        raise DataError(problem, field=field, value=str(path)) from None


def _lines(path: Path) -> Iterator[tuple[int, Row]]:
    return _csv_rows(path) if path.suffix == ".csv" else _json_lines(path)


def _csv_rows(path: Path) -> Iterator[tuple[int, Row]]:
    # What is not UTF-8 shows as a surrogate, which no UTF-8 has; a byte order mark is no part of a name.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        names = next(reader, [])
        while True:
            number = reader.line_num  # a quoted value may have several lines
            try:
                values = next(reader, None)
            except csv.Error as error:
                yield number + 1, f"not CSV ({error})"
                continue
            if values is None:
                return
            if not values:
                continue
            if len(values) != len(names):
                yield number + 1, f"has {len(values)} values, and the header {len(names)}"
            elif any("\udc80" <= letter <= "\udcff" for value in values for letter in value):
                yield number + 1, "not UTF-8"
            else:
                yield number + 1, {name: _value(text) for name, text in zip(names, values, strict=True)}


def _value(text: str) -> str | int | float | None:
    """Return what a value of CSV stands for; a number's text is that of the file again (007 is no number)."""
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if str(number) == text and math.isfinite(number):
            return number
    return text or None


def _json_lines(path: Path) -> Iterator[tuple[int, Row]]:
    # As bytes: text mode also splits lines at characters that JSON allows within a string.
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                yield number, f"not JSON ({error.msg})"
            except UnicodeDecodeError:
                yield number, "not UTF-8"
            except (ValueError, RecursionError) as error:  # a number of too many digits; nested too deeply
                yield number, f"not JSON ({error})"
            else:
                yield number, row if isinstance(row, dict) else "not a JSON object"


def _table_rows(path: Path, field: str) -> Iterator[dict[str, Any]]:
    if (path / "state.json").is_file():
        for file in _saved_files(path, field):
            with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as batches:
                for batch in batches:
                    yield from batch.to_pylist()
        return
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        split = sorted(state.parent.name for state in path.glob("*/state.json"))
        raise DataError(
            f"the folder holds the splits {split} of a data set" if split else "the folder holds no files of rows",
            field=field,
            value=str(path),
            remedy=f"give one of them: {path / split[0]}" if split else "files end in .jsonl, .csv or .parquet",
        )
    for file in files:
        with pq.ParquetFile(file, pre_buffer=False) as parquet:
            for batch in parquet.iter_batches():
                yield from batch.to_pylist()


def _saved_files(folder: Path, field: str) -> list[Path]:
    """Return the Arrow files of a data set saved with ``datasets.Dataset.save_to_disk``."""
    try:
        state = json.loads((folder / "state.json").read_text())
        return [folder / file["filename"] for file in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"state.json is not that of a saved data set ({type(error).__name__}: {error})",
            field=field,
            value=str(folder),
            remedy="save it again with Dataset.save_to_disk",
        ) from None


Message = dict[str, str]


def conversations(row: dict[str, Any], form: RowFormat) -> list[tuple[bool | None, list[Message]]]:
    """Return a row's conversations, which end with the assistant: one with None, or a pair with True (chosen) and False
    (rejected).

    Raises DataError with the problem if the row has none of the layouts.
    """
    chosen, rejected = row.get(form.chosen), row.get(form.rejected)
    prompt, response = row.get(form.prompt), row.get(form.response)
    if chosen is not None and rejected is not None:
        sides = [
            _joined(prompt, chosen, form.prompt, form.chosen),
            _joined(prompt, rejected, form.prompt, form.rejected),
        ]
        if sides[0] == sides[1]:
            raise DataError(f"{form.chosen!r} and {form.rejected!r} are the same")
        return [(True, sides[0]), (False, sides[1])]
    if row.get(form.messages) is not None:
        return [(None, _checked(_messages(row[form.messages], "assistant", form.messages), form.messages))]
    if not prompt or not response:
        raise DataError(
            f"needs text in {form.prompt!r} and {form.response!r}, or messages in {form.messages!r}, "
            f"or both {form.chosen!r} and {form.rejected!r}"
        )
    return [(None, _joined(prompt, response, form.prompt, form.response))]


def answer_label(value: Any, field: str) -> bool:
    """Return an answer's label. Raises DataError unless it is true or false."""
    if not isinstance(value, bool):
        raise DataError(f"needs true or false in {field!r}")
    return value


def pair_margin(value: Any, field: str) -> float | None:
    """Return a pair's margin, if it has one. Raises DataError unless it is a finite number."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{field!r} is no finite number")
    return float(value)


def tool_schemas(value: Any, field: str) -> tuple[dict[str, Any], ...]:
    """Return a row's tools: a list of JSON schemas of functions, or its JSON. Raises DataError if it is neither."""
    try:
        found = json.loads(value) if isinstance(value, str) else value or []
    except ValueError:
        found = value
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise DataError(f"{field!r} is no list of JSON schemas")
    return tuple(found)


def _joined(prompt: Any, answer: Any, prompt_field: str, answer_field: str) -> list[Message]:
    """Join prompt and answer. An answer that does not begin with the assistant contains its own prompt."""
    messages = _messages(answer, "assistant", answer_field)
    if messages[0]["role"] == "assistant":
        messages = [*_messages(prompt, "user", prompt_field), *messages]
    return _checked(messages, answer_field)


def _messages(value: Any, role: str, field: str) -> list[Message]:
    """Parse a text of ``role``, or a list of messages."""
    if isinstance(value, str) and value:
        return [{"role": role, "content": _text(value, field)}]
    if not isinstance(value, list) or not value:
        raise DataError(f"needs text or messages in {field!r}")
    return [_message(message, f"{field}[{index}]") for index, message in enumerate(value)]


def _message(value: Any, path: str) -> Message:
    """Parse a message; fields besides role and content, for chat templates, must be text as well."""
    if not isinstance(value, dict):
        raise DataError(f"{path} is not a message with 'role' and 'content'")
    # Arrow gives every message the fields of all messages, null where it has none.
    message = {key: _text(text, f"{path}.{key}") for key, text in value.items() if text is not None}
    if not {"role", "content"} <= message.keys():
        raise DataError(f"{path} needs 'role' and 'content'")
    if message["role"] == "assistant" and not message["content"]:
        raise DataError(f"{path}: the assistant says nothing")
    return message


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{path} is not text")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can contain half a surrogate pair, which no tokenizer accepts
        raise DataError(f"{path} is not valid Unicode") from None
    return value


def _checked(messages: list[Message], field: str) -> list[Message]:
    if messages[0]["role"] == "assistant":
        raise DataError(f"{field!r} begins with the assistant, without a prompt")
    if messages[-1]["role"] != "assistant":
        raise DataError(f"{field!r} does not end with the assistant")
    return messages
