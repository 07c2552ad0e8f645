"""Task and experience: the records that all parts exchange.

An experience is one trajectory segment: a token sequence, a mask of the tokens that the policy produced, and their
log-probs, reward and metadata. Inside a process it is an :class:`Experience`; between processes it is a row of an Arrow
record batch with :data:`SCHEMA`: ragged one-dimensional lists, no padding.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import lru_cache
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from rayrft.errors import DataError, first_line
from rayrft.markup import Markup, block, element, facts, picture

Source = Literal["usual", "expert", "human", "synthetic"]
SOURCES: tuple[str, ...] = ("usual", "expert", "human", "synthetic")
SCHEMA_VERSION = "5"

TRUNCATED = ("length", "repetition")
"""Stop reasons of answers that the model did not end."""

MASKED = "masked"
"""Status of a row that is never trained; its reward counts in its group's advantages."""

ROUNDING = 1e-6
"""Rewards that differ by less than this share of them are equal."""


def reaches(value: float, least: float = 1.0) -> bool:
    """Return whether a reward or a share is at least ``least``, by default full marks, up to rounding. A computed value
    or one of a float32 column may miss the bound by 1e-6 of it."""
    return value >= least - ROUNDING * abs(least)


@dataclass(frozen=True)
class Task:
    """A question with its reference answer. ``id`` is a stable hash of source and `key`."""

    id: str
    question: str
    answer: str
    domain: str = "own"
    workflow: str | None = None
    """Name of its workflow; by default ``explorer.workflow`` of the config."""
    difficulty: float | None = None
    tries: int = 0
    """Answers to it that were scored before the run."""
    pass_rate: float | None = None
    """Their mean reward, within 0 and 1."""
    priority: float | None = None
    """Its weight among the draws of task sampler ``priority``."""
    system: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    images: tuple[str, ...] = ()
    """Paths; see `rayrft.data.images` for their positions in the question."""
    history: tuple[dict[str, str], ...] = ()
    """Messages of user and assistant before the question."""
    other_answers: tuple[str, ...] = ()
    """Further right answers: an answer's reward is the best that any of them gives."""

    def __post_init__(self) -> None:
        for name in ("question", "answer", "domain", "workflow", "system"):
            text = getattr(self, name)
            if not isinstance(text, str) and (text is not None or name in ("question", "answer", "domain")):
                problem = f"the {name} of a task is {type(text).__name__}, not a text"
                raise DataError(problem, "give a text", field=name, value=text)

    @classmethod
    def create(cls, source: str, question: str, answer: str, **rest: Any) -> Task:
        task = cls("", question, answer, **rest)
        return replace(task, id=json_digest([source, task.key]))

    @property
    def passes(self) -> float:
        """The sum of the rewards of its tries."""
        return self.tries * (self.pass_rate or 0.0)

    @property
    def key(self) -> str:
        """Digest of the fields that identify a task: tasks with equal keys are duplicates."""
        about = self.question, self.answer, self.system, self.domain, self.workflow, self.images, self.metadata
        more = (self.history, self.other_answers) if self.history or self.other_answers else ()
        return json_digest(about + more)

    @property
    def dedup_key(self) -> str:
        """Question text with the messages before it, image paths and environment. No training task shares it with an
        evaluation task."""
        shown, episode = dedup_key(self.question, self.images), self.metadata.get("environment")
        more = [each for each in (self.history, episode) if each not in ((), None)]
        return "\n".join([shown, *(json.dumps(each, default=str) for each in more)])

    @property
    def messages(self) -> list[dict[str, str]]:
        """The task's initial conversation, in chat form."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.history, {"role": "user", "content": self.question}]


def json_digest(value: object) -> str:
    """Return a digest of a value as JSON, in 16 hexadecimal digits."""
    return hashlib.blake2b(json.dumps(value, default=str).encode(), digest_size=8).hexdigest()


def dedup_key(question: str, images: tuple[str, ...]) -> str:
    """Join question and image paths; without images, return the question itself."""
    return "\n".join([question, *images])


TOKEN_REWARD = "token_reward_"
"""With the index of a token, the metric of a row that is the reward of the step inside an answer that ends with it."""


def rewards_by_token(metrics: Mapping[str, float]) -> dict[int, float]:
    """Return the rewards of steps inside answers that a row has in its metrics, by the index of the token."""
    places = {name: name.removeprefix(TOKEN_REWARD) for name in metrics if name.startswith(TOKEN_REWARD)}
    return {int(place): metrics[name] for name, place in places.items() if place.isdecimal()}


@dataclass(frozen=True)
class VersionSpan:
    """Tokens ``[start, end)`` of the sequence were sampled under weights of this version."""

    start: int
    end: int
    version: int


@dataclass(frozen=True)
class Experience:
    """One trajectory segment of T tokens. Arrays have shape ``[T]``.

    ``action_mask`` is 1 on tokens that the model (or the expert) produced; ``logprobs`` (nats, of the behaviour policy
    at sampling time) are 0 elsewhere. ``experience_id``, of run, task, group, repeat, attempt and segment, makes a
    retry idempotent; it is the ``group_id``, optionally followed by ``/…``.
    """

    experience_id: str
    group_id: str
    task_id: str
    token_ids: np.ndarray
    prompt_length: int
    action_mask: np.ndarray
    logprobs: np.ndarray
    source: Source = "usual"
    weight_versions: tuple[VersionSpan, ...] = ()
    reward: float | None = None
    reward_components: dict[str, float] = field(default_factory=dict)
    greedy_reward: float | None = None
    """Reward of the greedy answer to the task, for advantages that compare with it."""
    status: str = "finished"
    """Or `MASKED`."""
    stop_reason: str | None = None
    error: str | None = None
    priority: float = 1.0
    uses: int = 0
    turns: tuple[dict[str, str], ...] = ()
    images: tuple[str, ...] = ()
    pair_id: str | None = None
    chosen: bool | None = None
    """Whether it is the preferred row of its pair; of a row in no pair, whether it is labelled good."""
    margin: float | None = None
    """How much better the chosen row of its pair is, according to its annotators; for reward models."""
    teacher_logprobs: np.ndarray | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    """Human feedback."""
    created_at: float = 0.0
    finished_at: float = 0.0

    def with_fields(self, **fields: Any) -> Experience:
        """Return a copy with these fields, in a tenth of `replace`'s time. Raises TypeError for an unknown name."""
        values, copy = vars(self) | fields, object.__new__(Experience)
        if len(values) > len(vars(self)):
            raise TypeError(f"an experience has no {', '.join(sorted(fields.keys() - vars(self).keys()))}")
        object.__setattr__(copy, "__dict__", values)
        return copy

    @property
    def repeat(self) -> str:
        """The trajectory that it belongs to: ids ``<group_id>/<repeat>`` and ``<group_id>/<repeat>/…`` are one."""
        return self.experience_id.removeprefix(self.group_id).strip("/").partition("/")[0]

    def __repr__(self) -> str:
        return f"<Experience {self.experience_id}: reward {self.reward}, {len(self.token_ids)} tokens, {self.status}>"

    def _repr_html_(self) -> str:
        return ExperienceGroup(self.group_id, (self,))._repr_html_()


_MOST_TOKENS, _MOST_ROWS = 1000, 16
"""Tokens of a row and rows of a group that are shown."""


@dataclass(frozen=True)
class ExperienceGroup:
    """The rows of a group, which a notebook shows side by side under their question."""

    group_id: str
    rows: tuple[Experience, ...]
    text_of: Callable[[int], str] | None = field(default=None, repr=False, compare=False)
    """Decodes a token; None if the tokenizer is not known."""

    def _repr_html_(self) -> str:
        roles = [turn.get("role") for turn in self.rows[0].turns]
        asked = roles.index("assistant") if "assistant" in roles else 0
        style = "flex:1 1 14em;max-width:32em;min-width:0"
        cards = [element("div", *self._card(row, asked), style=style) for row in self.rows[:_MOST_ROWS]]
        side_by_side = element("div", *cards, style="display:flex;flex-wrap:wrap;gap:16px")
        title = f"{len(self.rows)} rows of {self.group_id}" if self.rows[1:] else self.rows[0].experience_id
        return element("div", element("b", title), *_blocks(self.rows[0].turns[:asked]), side_by_side)

    def _card(self, row: Experience, asked: int) -> list[Markup]:
        versions = sorted({span.version for span in row.weight_versions})
        shown: dict[str, Any] = {"reward": "unknown" if row.reward is None else row.reward}
        shown |= {"parts": row.reward_components, "labels": row.labels, "versions": versions, "status": row.status}
        shown |= {"stopped by": row.stop_reason, "error": row.error, "tokens": self._tokens(row)}
        shown["row"] = row.experience_id.removeprefix(self.group_id)
        return [*_blocks(row.turns[asked:]), *map(picture, row.images), facts(shown)]

    def _tokens(self, row: Experience) -> Markup | None:
        """Return the tokens after the prompt: those of the model the redder the less probable, up to 0.1 %."""
        if self.text_of is None:
            return None
        part, shown = slice(row.prompt_length, row.prompt_length + _MOST_TOKENS), list[Markup]()
        columns = (each[part].tolist() for each in (row.token_ids, row.action_mask, row.logprobs))
        for token, sampled, logprob in zip(*columns, strict=True):
            style = f"background:rgba(230,70,40,{min(-logprob / 7, 1) * 0.6:.2f})" if sampled else "opacity:.6"
            hint = f"log-prob {logprob:.3f}, {math.exp(logprob):.1%}" if sampled else "not sampled"
            shown.append(element("span", self.text_of(token), style=style, title=hint))
        rest = len(row.token_ids) - part.stop
        return block("by log-prob", *shown, *([f" … {rest:,} more"] if rest > 0 else []))


def _blocks(turns: Sequence[Mapping[str, str]]) -> list[Markup]:
    return [block(turn.get("role") or "no role", turn.get("content") or "") for turn in turns]


_SPAN = pa.struct([("start", pa.int32()), ("end", pa.int32()), ("version", pa.int64())])
SCHEMA = pa.schema(
    [
        pa.field("experience_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("task_id", pa.string(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("prompt_length", pa.int32(), nullable=False),
        pa.field("action_mask", pa.list_(pa.uint8()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("weight_versions", pa.list_(_SPAN)),
        pa.field("reward", pa.float32()),
        pa.field("reward_components", pa.map_(pa.string(), pa.float32())),
        pa.field("greedy_reward", pa.float32()),
        pa.field("status", pa.string()),
        pa.field("stop_reason", pa.string()),
        pa.field("error", pa.string()),
        pa.field("priority", pa.float32()),
        pa.field("uses", pa.int32()),
        pa.field("turns", pa.list_(pa.map_(pa.string(), pa.string()))),
        pa.field("images", pa.list_(pa.string())),
        pa.field("pair_id", pa.string()),
        pa.field("chosen", pa.bool_()),
        pa.field("margin", pa.float32()),
        pa.field("teacher_logprobs", pa.list_(pa.float32())),
        pa.field("metrics", pa.map_(pa.string(), pa.float32())),
        pa.field("labels", pa.map_(pa.string(), pa.string())),
        pa.field("created_at", pa.float64()),
        pa.field("finished_at", pa.float64()),
    ],
    metadata={"rayrft.schema": SCHEMA_VERSION},
)

_NAMES = SCHEMA.names
_TYPES = {f.name: f.type for f in SCHEMA}
_LISTS = [f.name for f in SCHEMA if pa.types.is_list(f.type) and pa.types.is_primitive(f.type.value_type)]
_ARRAYS = {name: np.dtype(_TYPES[name].value_type.to_pandas_dtype()) for name in _LISTS}
_REQUIRED = [(index, f.name) for index, f in enumerate(SCHEMA) if not f.nullable]
_MAPS = [f.name for f in SCHEMA if pa.types.is_map(f.type)]
_DEFAULTS = {f.name: f.default for f in fields(Experience) if f.default is not MISSING} | dict.fromkeys(_MAPS, ())


def to_batch(experiences: Sequence[Experience]) -> pa.RecordBatch:
    """Convert experiences to a batch of :data:`SCHEMA`. Raises DataError, with the column, for a misfit."""
    columns = [*zip(*map(itemgetter(*_NAMES), map(vars, experiences)), strict=True)] or [()] * len(_NAMES)
    arrays = [_column(name, values) for name, values in zip(_NAMES, columns, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)
    check_filled(batch)
    return batch


def _column(name: str, values: Sequence[Any]) -> pa.Array:
    """Convert a field of rows. Raises DataError for a misfit."""
    try:
        if name in _ARRAYS and (array := _ragged(values, _ARRAYS[name])) is not None:
            return array
        if convert := _CONVERT.get(name):
            values = convert(values)
        if name in _DEFAULTS and {*map(id, values)} == {id(_DEFAULTS[name])}:
            return _unset(name, len(values))
        return pa.array(values, _TYPES[name])
    except _MISFITS as error:
        problem = f"a value is not of type {_TYPES[name]}: {first_line(error)}"
        raise DataError(problem, "see the fields of Experience for its type", field=name) from None


def _ragged(values: Sequence[Any], of: np.dtype) -> pa.Array | None:
    """Return a column of lists from numpy arrays of one type, in a fifth of Arrow's time; None for other values."""
    if not values or not all(type(value) is np.ndarray and value.ndim == 1 for value in values):
        return None
    flat, ends = np.concatenate(values), np.cumsum([0, *map(len, values)])
    if flat.dtype != of or ends[-1] > np.iinfo(np.int32).max:
        return None
    return pa.ListArray.from_arrays(ends.astype(np.int32), flat)


@lru_cache(maxsize=1024)
def _unset(name: str, count: int) -> pa.Array:
    """Return a column of a field's default, which is never written to."""
    return pa.array([_DEFAULTS[name]] * count, _TYPES[name])


def _whole(values: Any) -> Any:
    if (array := np.asarray(values)).dtype.kind == "f" and array.size:
        raise TypeError("floating-point numbers, which Arrow would truncate")
    return values


_MISFITS = (pa.ArrowException, TypeError, ValueError, AttributeError, OverflowError)
_CONVERT: dict[str, Callable[[Sequence[Any]], Sequence[Any]]] = {
    **dict.fromkeys(_MAPS, lambda values: [tuple(value.items()) for value in values]),
    **dict.fromkeys(["token_ids", "action_mask"], lambda values: [*map(_whole, values)]),
    "prompt_length": _whole,
    "turns": lambda values: [[list(turn.items()) for turn in value] for value in values],
    "weight_versions": lambda values: [[vars(span) for span in value] for value in values],
}
"""Fields whose values Arrow does not convert, or check, by itself."""


def from_batch(batch: pa.RecordBatch) -> list[Experience]:
    """Convert a record batch to experiences; arrays are views of the Arrow memory."""
    columns = field_values(batch.select(_NAMES))
    return [Experience(**{name: values[row] for name, values in columns.items()}) for row in range(batch.num_rows)]


def field_values(batch: pa.RecordBatch) -> dict[str, list[Any]]:
    """Return columns of :data:`SCHEMA` as the values of fields of experiences, by name."""
    columns: dict[str, list[Any]] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        values = list_column(column) if name in _LISTS else column.to_pylist()
        convert = _FIELDS.get(name)
        columns[name] = values if convert is None else [convert(value or ()) for value in values]
    return columns


_FIELDS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(_MAPS, dict),
    "turns": lambda value: tuple(map(dict, value)),
    "images": tuple,
    "weight_versions": lambda value: tuple(VersionSpan(**span) for span in value),
}
"""Fields whose values Arrow represents by others."""


def list_column(column: pa.ListArray, rows: Sequence[int] | np.ndarray | None = None) -> list[np.ndarray | None]:
    """Return numpy views of a column of primitive lists, for all or these rows; None where the list is null."""
    values = column.values.to_numpy(zero_copy_only=False)
    offsets = column.offsets.to_numpy()
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    wanted = range(len(column)) if rows is None else rows
    return [values[offsets[row] : offsets[row + 1]] if valid[row] else None for row in wanted]


def check_schema(schema: pa.Schema) -> None:
    """Raise DataError unless rows of this schema are experiences."""
    if not schema.equals(SCHEMA, check_metadata=True):
        raise DataError("rows do not have the experience schema", "use to_batch()", field="schema", value=schema.names)


def check_filled(batch: pa.RecordBatch) -> None:
    """Raise DataError if a required column of :data:`SCHEMA` has a null."""
    for index, name in _REQUIRED:
        if batch.column(index).null_count:
            raise DataError("a row lacks a value", "set it on every row: see the fields of Experience", field=name)


def pack(batch: pa.RecordBatch) -> pa.Buffer:
    """Serialise rows to one Arrow IPC message, the form for actor calls, the object store and the disk; pickling every
    column costs ten times as much. Raises DataError if the rows are not of :data:`SCHEMA`."""
    check_schema(batch.schema)
    return batch.serialize()


def unpack(message: pa.Buffer) -> pa.RecordBatch:
    """Deserialise the rows of a message, without a copy."""
    return pa.ipc.read_record_batch(message, SCHEMA)
