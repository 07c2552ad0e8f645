"""Rows of expert data to experiences, by the same rules wherever the rows come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayrft.config.demonstrations import DemonstrationsConfig, RowFormat
from rayrft.data.formats import Message, Row, conversations, read_rows
from rayrft.data.images import paths
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import DataError
from rayrft.experience import SCHEMA, Experience, Task, asked, to_batch

if TYPE_CHECKING:
    import ray.data

_SIDES = {None: "", True: "/chosen", False: "/rejected"}


@dataclass(frozen=True)
class LeftOut:
    """Rows that are not trained, by number from 1: lines of a JSONL file, rows of anything else."""

    ruled_out: dict[int, str] = field(default_factory=dict)
    """Rows that must not or cannot be trained, each with the rule."""
    broken: dict[int, str] = field(default_factory=dict)
    """Rows that cannot be understood, each with what is wrong."""

    def __len__(self) -> int:
        return len(self.ruled_out) + len(self.broken)

    @property
    def counts(self) -> Counter[str]:
        """How many by reason; the reason of broken rows lists the first ten of them."""
        counts = Counter(self.ruled_out.values())
        if self.broken:
            first = ", ".join(map(str, sorted(self.broken)[:10])) + (", …" if len(self.broken) > 10 else "")
            counts[f"broken (lines {first})"] = len(self.broken)
        return counts


@dataclass(frozen=True)
class RowEncoder:
    """Makes experiences of rows. A row is left out where it is longer than ``max_length`` tokens, where one of its
    users asks what a task of ``held_out`` asks (`Task.asked`), and where it is broken."""

    name: str
    form: RowFormat
    tokenizer: ChatTokenizer
    max_length: int
    held_out: Set[str]
    beside: Path = Path("rows")
    """The file that the rows are from: relative paths of images are from where it lies."""

    def encode(self, rows: Iterable[tuple[int, Row]]) -> tuple[dict[int, list[Experience]], LeftOut]:
        """The experiences by number of their row, and which rows gave none."""
        taken, left_out = {}, LeftOut()
        for number, row in rows:
            try:
                made = self._encode_row(f"{self.name}/{number}", row)
            except DataError as error:
                left_out.broken[number] = f"{error.problem} ({error.remedy})" if error.remedy else error.problem
                continue
            if isinstance(made, str):
                left_out.ruled_out[number] = made
            else:
                taken[number] = made
        return taken, left_out

    def _encode_row(self, group: str, row: Row) -> list[Experience] | str:
        """The row's experiences, or the rule by which it has none. Raises DataError where it is broken."""
        if isinstance(row, str):
            raise DataError(row)
        made = []
        images = paths(row.get(self.form.images), self.beside)
        for chosen, messages in conversations(row, self.form):
            if any(each["role"] == "user" and asked(each["content"], images) in self.held_out for each in messages):
                return "held-out question"
            ids, mask = self.tokenizer.chat(messages, images)
            if len(ids) > self.max_length:
                return "too long"
            side = group + _SIDES[chosen]
            made.append(expert_row(side, group, ids, mask, messages, images=images, chosen=chosen))
        return made


def expert_row(
    experience_id: str,
    group: str,
    ids: list[int],
    mask: list[int],
    turns: list[Message],
    *,
    task_id: str | None = None,
    images: tuple[str, ...] = (),
    chosen: bool | None = None,
) -> Experience:
    """An experience of the expert; ``ids`` and ``mask`` have one entry per token. Its prompt ends at the first action.

    It is one side of the group's preference pair where ``chosen`` is given.
    """
    return Experience(
        experience_id=experience_id,
        group_id=group,
        task_id=task_id or group,
        token_ids=np.array(ids, dtype=np.int32),
        prompt_length=mask.index(1) if mask else 0,
        action_mask=np.array(mask, dtype=np.uint8),
        logprobs=np.zeros(len(ids), dtype=np.float32),
        source="expert",
        turns=tuple(turns),
        images=images,
        pair_id=None if chosen is None else group,
        chosen=chosen,
    )


_NUMBER = "rayrft.number"
_FINISHED, _BROKEN, _RULED_OUT = "finished", "broken", "ruled out"


def from_tasks(
    name: str, tasks: list[Task], config: DemonstrationsConfig, tokenizer: ChatTokenizer, seed: int
) -> list[Experience]:
    """One demonstration per task. The first ``wrong_share`` of a seeded shuffle shows ``wrong_field`` as the answer."""
    wrong = set(
        np.random.default_rng([seed, 1]).permutation(len(tasks))[: round(config.wrong_share * len(tasks))].tolist()
    )
    rows = []
    for index, task in enumerate(tasks):
        answer = task.answer
        if index in wrong:
            answer = str(_metadata(task, config.wrong_field, name))
        rows.append(demonstrate(f"{name}/{task.id}", task, answer, tokenizer))
    return rows


def demonstrate(experience_id: str, task: Task, response: str, tokenizer: ChatTokenizer) -> Experience:
    """A task's prompt and the response to imitate, with the tokens of a rollout that answers so."""
    prompt, answer = tokenizer.prompt(task.messages, task.images), tokenizer.response(response)
    mask = [0] * len(prompt) + [1] * len(answer)
    turns = [*task.messages, {"role": "assistant", "content": response}]
    ids = prompt + answer
    return expert_row(experience_id, experience_id, ids, mask, turns, task_id=task.id, images=task.images)


def from_file(
    name: str, config: DemonstrationsConfig, tokenizer: ChatTokenizer, max_length: int, held_out: Set[str] = frozenset()
) -> tuple[list[Experience], LeftOut]:
    """The demonstrations of ``config.path``, and which rows were left out.

    A row gives one experience with the id ``<name>/<number>``; a preference pair gives two in the group of that name,
    ``…/chosen`` and ``…/rejected``. Raises DataError when the file is missing, cannot be read or has no usable row, and
    with the line numbers when rows are broken and not to be skipped.
    """
    assert config.path is not None  # the config's own rule
    place = f"demonstrations.{name}.path"
    encoder = RowEncoder(name, config, tokenizer, max_length, held_out, config.path)
    taken, left_out = encoder.encode(read_rows(config.path, place))
    _check(len(taken), left_out, config, place, str(config.path))
    return [row for rows in list(taken.values())[: config.size] for row in rows], left_out


def from_dataset(
    name: str,
    dataset: ray.data.Dataset,
    config: RowFormat,
    tokenizer: ChatTokenizer,
    max_length: int,
    held_out: Set[str] = frozenset(),
) -> tuple[ray.data.Dataset, LeftOut]:
    """What :func:`from_file` does, for a Ray Dataset and in Ray Data: a dataset with rows of ``experience.SCHEMA``.

    The dataset is executed here and now, for its broken rows are an error before anything is trained. Its rows stay in
    the object store, in their order; what comes to this process is the numbers of rows that are left out, with why.
    Raises DataError as :func:`from_file` does.
    """
    place = f"demonstrations.{name}"
    numbered, total = _numbered(dataset, place)
    encoder = RowEncoder(name, config, tokenizer, max_length, held_out)
    encoded = numbered.map_batches(_encode, batch_format="pyarrow", fn_args=(encoder,)).materialize()
    left_out = LeftOut()
    for husk in encoded.map_batches(_husks, batch_format="pyarrow", batch_size=None).iter_rows():
        reasons = left_out.broken if husk["status"] == _BROKEN else left_out.ruled_out
        reasons[_number(husk["group_id"])] = husk["error"]
    _check(total - len(left_out), left_out, config, place, None)
    kept = sorted(set(range(1, total + 1)) - left_out.broken.keys() - left_out.ruled_out.keys())
    last = kept[: config.size][-1]
    return encoded.map_batches(_rows_until, batch_format="pyarrow", batch_size=None, fn_args=(last,)), left_out


def _check(kept: int, left_out: LeftOut, form: RowFormat, place: str, value: str | None) -> None:
    if left_out.broken and form.on_broken == "fail":
        first = "; ".join(f"line {number}: {why}" for number, why in sorted(left_out.broken.items())[:5])
        raise DataError(
            f"{len(left_out.broken)} broken rows of {kept + len(left_out)}: {first}",
            field=place,
            value=value,
            remedy="mend or delete these lines, or set on_broken to 'skip'",
        )
    if not kept:
        raise DataError(
            f"no usable row (left out: {dict(left_out.counts)})",
            field=place,
            value=value,
            remedy="look at the reasons: each names what such a row lacks",
        )


def _metadata(task: Task, field: str | None, name: str) -> Any:
    if field not in task.metadata:
        raise DataError(
            f"tasks have no metadata field {field!r}",
            field=f"demonstrations.{name}.wrong_field",
            value=field,
            remedy=f"choose one of {sorted(task.metadata)}",
        )
    return task.metadata[field]


def _numbered(dataset: ray.data.Dataset, place: str) -> tuple[ray.data.Dataset, int]:
    """The rows with a column of their numbers from 1, and how many they are.

    Ray Data numbers no rows and hands on blocks as they finish. So it is told to keep the dataset's own order, and each
    block is told at which row it begins: ids and reports then name the same row in every run.
    """
    import ray.data

    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        tables = dataset.to_arrow_refs()
    finally:
        options.preserve_order = before
    count, number = ray.remote(_count), ray.remote(_number_block)
    lengths = ray.get([count.remote(table) for table in tables])
    if not sum(lengths):
        raise DataError("the dataset holds no rows", field=place, remedy="give a dataset that is not empty")
    firsts = accumulate(lengths, initial=1)
    blocks = [number.remote(table, first) for table, first in zip(tables, firsts, strict=False)]
    numbered = ray.data.from_arrow_refs(blocks)
    numbered.context.execution_options.preserve_order = True
    return numbered, sum(lengths)


def _count(table: pa.Table) -> int:
    return len(table)


def _number_block(table: pa.Table, first: int) -> pa.Table:
    return table.append_column(_NUMBER, pa.array(range(first, first + len(table)), pa.int64()))


def _encode(table: pa.Table, encoder: RowEncoder) -> pa.Table:
    """Experiences, and for each row that is left out a husk that says why."""
    numbers = table.column(_NUMBER).to_pylist()
    taken, left_out = encoder.encode(zip(numbers, table.drop_columns([_NUMBER]).to_pylist(), strict=True))
    made = [row for rows in taken.values() for row in rows]
    for status, reasons in ((_BROKEN, left_out.broken), (_RULED_OUT, left_out.ruled_out)):
        for number, why in reasons.items():
            group = f"{encoder.name}/{number}"
            made.append(replace(expert_row(group, group, [], [], []), status=status, error=why))
    return pa.Table.from_batches([to_batch(made)])


def _husks(table: pa.Table) -> pa.Table:
    return table.filter(pc.not_equal(table.column("status"), _FINISHED)).select(["group_id", "status", "error"])


def _rows_until(table: pa.Table, last: int) -> pa.Table:
    """The experiences of rows up to number ``last``."""
    early = pa.array([_number(group) <= last for group in table.column("group_id").to_pylist()], pa.bool_())
    return table.filter(pc.and_(pc.equal(table.column("status"), _FINISHED), early)).cast(SCHEMA)


def _number(group: str) -> int:
    return int(group.rpartition("/")[2])
