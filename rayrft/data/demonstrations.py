"""Conversion of expert data (files, tasks, Ray Datasets) to experiences."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Set
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from rayrft.config.demonstrations import DemonstrationsConfig, RowFormat
from rayrft.config.seeds import generator
from rayrft.data.conversations import displayed, read_conversations
from rayrft.data.formats import ParsedRow, SkippedRows, answer_text, as_list, broken_rows, finite, rows_of, value_at
from rayrft.data.images import image_paths
from rayrft.data.row_sources import open_source
from rayrft.data.tables import ordered_blocks
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import DataError
from rayrft.experience import Experience, Task, dedup_key, to_batch

if TYPE_CHECKING:
    import ray.data


@dataclass(frozen=True)
class RowEncoder:
    """Encodes rows as experiences. It skips rows longer than ``max_length`` tokens, rows that contain a held-out
    question (``held_out`` are `Task.dedup_key`), and broken rows.

    A row becomes the experience ``<name>/<number>``; a pair, two of that group, ``…/chosen`` and ``…/rejected``.
    """

    name: str
    form: RowFormat
    tokenizer: ChatTokenizer
    max_length: int
    held_out: Set[str] = frozenset()
    whole: bool = False
    """For a reward model: rows are tokenised by `ChatTokenizer.whole`."""
    labelled: bool = False
    """Whether rows that are not pairs must have a label."""
    layouts: Counter[str] = field(default_factory=Counter)
    """Number of the rows encoded so far, by layout."""

    base: Path = Path("rows")
    """The folder, or a file in it, to which paths of images are relative."""

    def encode(
        self, rows: Iterable[tuple[int, ParsedRow]], size: int | None = None
    ) -> tuple[dict[int, list[Experience]], SkippedRows]:
        """Encode numbered rows until ``size`` are usable; return experiences by row number, and the skipped rows."""
        encoded, skipped = {}, SkippedRows()
        for number, row in rows:
            try:
                result = self._encode_row(f"{self.name}/{number}", row)
            except DataError as error:
                skipped.broken[number] = f"{error.problem} ({error.remedy})" if error.remedy else error.problem
                continue
            if isinstance(result, str):
                skipped.excluded[number] = result
            else:
                encoded[number] = result
            if len(encoded) == size:
                break
        return encoded, skipped

    def _encode_row(self, group: str, row: ParsedRow) -> list[Experience] | str:
        """Return the row's experiences, or the rule that excludes it. Raises DataError if it is broken."""
        if isinstance(row, str):
            raise DataError(row)
        read = read_conversations(row, self.form)
        self.layouts[read.layout] += 1
        sides, experiences, column = read.sides, [], as_list(value_at(row, self.form.images))
        pictures = [image_paths([*column, *side.pictures], self.base, self.form.images_folder) for side in sides]
        if self.labelled and len(sides) == 1 and sides[0].chosen is None:
            if not isinstance(label := value_at(row, self.form.label), bool):
                raise DataError(f"needs true or false in {self.form.label!r}")
            sides = [replace(sides[0], chosen=label)]
        as_chat = self.tokenizer.whole if self.whole else self.tokenizer.chat
        encoded = [
            as_chat(side.messages, images, read.tools) if side.texts is None else self.tokenizer.texts(*side.texts)
            for side, images in zip(sides, pictures, strict=True)
        ]
        if read.paired and sides[0].texts is not None:  # a token at the end of the prompt may differ in one of them
            first = min(mask.index(1) for _, mask in encoded)
            encoded = [(ids, [0] * first + [1] * (len(ids) - first)) for ids, _ in encoded]
        for number, (side, images, (ids, mask)) in enumerate(zip(sides, pictures, encoded, strict=True), start=1):
            questions = [message["content"] for message in side.messages if message["role"] == "user"]
            if any(dedup_key(question, images) in self.held_out for question in questions):
                return "held-out question"
            if len(ids) > self.max_length:
                return "too long"
            turns = displayed(side.messages)
            made = expert_row(group, group, ids, mask, turns, images=images, chosen=side.chosen)
            if read.paired:
                name = f"{group}/{'chosen' if side.chosen else 'rejected'}"
                given = value_at(row, self.form.margin)
                if given is not None and finite(given) is None:
                    raise DataError(f"{self.form.margin!r} is not a finite number")
                made = replace(made, experience_id=name, pair_id=group, margin=finite(given))
            elif len(sides) > 1:
                made = replace(made, experience_id=f"{group}/step-{number}")
            experiences.append(made)
        return experiences


def expert_row(
    experience_id: str,
    group: str,
    ids: list[int],
    mask: list[int],
    turns: list[dict[str, str]],
    *,
    task_id: str | None = None,
    images: tuple[str, ...] = (),
    chosen: bool | None = None,
) -> Experience:
    """Create an expert experience; ``ids`` and ``mask`` have one entry per token. The prompt ends at the first action.

    ``chosen`` is its label, if it has one.
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
        chosen=chosen,
    )


def from_tasks(
    name: str, tasks: list[Task], config: DemonstrationsConfig, tokenizer: ChatTokenizer, seed: int
) -> list[Experience]:
    """Create one demonstration per task; a fraction ``wrong_share``, drawn by seed, shows ``wrong_field`` as answer."""
    order = generator(seed, "wrong demonstrations").permutation(len(tasks))
    wrong = set(order[: round(config.wrong_share * len(tasks))].tolist())
    rows = []
    for index, task in enumerate(tasks):
        answer = task.answer
        if index in wrong:
            if config.wrong_field not in task.metadata:
                problem, remedy = "tasks have no such metadata field", f"choose one of {sorted(task.metadata)}"
                raise DataError(problem, remedy, field=f"demonstrations.{name}.wrong_field", value=config.wrong_field)
            answer = answer_text(task.metadata[config.wrong_field], config.wrong_field)
        rows.append(demonstrate(f"{name}/{task.id}", task, answer, tokenizer))
    return rows


def demonstrate(experience_id: str, task: Task, response: str, tokenizer: ChatTokenizer) -> Experience:
    """Create a demonstration of ``response`` to a task, with the same tokens as a rollout with this response."""
    prompt, answer = tokenizer.prompt(task.messages, task.images), tokenizer.response(response)
    mask = [0] * len(prompt) + [1] * len(answer)
    turns = [*task.messages, {"role": "assistant", "content": response}]
    ids = prompt + answer
    return expert_row(experience_id, experience_id, ids, mask, turns, task_id=task.id, images=task.images)


def from_source(encoder: RowEncoder) -> tuple[list[Experience], SkippedRows]:
    """Read the demonstrations of a file, data set or Ray Dataset; return them and the skipped rows.

    Raises DataError if it is missing, unreadable or has no usable row, and with line numbers if rows are broken and
    ``on_broken`` is ``fail``.
    """
    assert isinstance(encoder.form, DemonstrationsConfig)
    source = open_source(encoder.form, f"demonstrations.{encoder.name}")
    with closing(source.rows) as rows:
        encoded, skipped = replace(encoder, base=source.base).encode(rows, encoder.form.size)
    _check(len(encoded), skipped, encoder.form, source.field, source.origin)
    return [row for group in encoded.values() for row in group], skipped


def held_out_name(name: str) -> str:
    """Return the name under which the Buffer keeps the held-out pairs of these demonstrations."""
    return f"{name}.held_out"


def hold_out(
    name: str, rows: list[Experience], held_out: float, seed: int
) -> tuple[list[Experience], list[Experience]]:
    """Split preference pairs, by chance, into those to train on and the held-out ones, each in their order.

    Held out are all pairs of as many prompts as give ``held_out`` of them, a share below 1 or a number. A model that
    has seen a prompt's other answers would be ranked too well. Raises DataError unless all are pairs, in both parts.
    """
    field, pairs = f"demonstrations.{name}.held_out", list(zip(rows[::2], rows[1::2], strict=False))
    if len(rows) % 2 or any(one.pair_id is None or one.pair_id != other.pair_id for one, other in pairs):
        raise DataError("some rows are not preference pairs", "leave it out", field=field, value=held_out)
    by_prompt: dict[str, list[int]] = {}
    for number, (chosen, _) in enumerate(pairs):
        by_prompt.setdefault(json.dumps([chosen.turns[:-1], chosen.images]), []).append(number)
    wanted = held_out if held_out >= 1 else held_out * len(pairs)
    prompts, taken = list(by_prompt.values()), set[int]()
    random.Random(f"{seed}/{name}").shuffle(prompts)
    for numbers in prompts:
        if len(taken) >= wanted:
            break
        taken.update(numbers)
    if not 0 < len(taken) < len(pairs):
        problem = f"leaves {len(pairs) - len(taken)} of {len(pairs)} pairs, of {len(prompts)} prompts, to train on"
        raise DataError(problem, "hold out fewer, or give more prompts", field=field, value=held_out)
    numbered = [(number in taken, side) for number, pair in enumerate(pairs) for side in pair]
    return [side for held, side in numbered if not held], [side for held, side in numbered if held]


def from_dataset(dataset: ray.data.Dataset, encoder: RowEncoder) -> tuple[ray.data.Dataset, SkippedRows]:
    """Encode a Ray Dataset as :func:`from_source` does, to a dataset with rows of ``experience.SCHEMA``.

    The dataset is executed at once, as broken rows must raise before training. Its rows stay in the object store, in
    their order; this process gets the numbers and reasons of skipped ones. Raises DataError as :func:`from_source`.
    """
    import ray.data

    field, tables = f"demonstrations.{encoder.name}", ordered_blocks(dataset)
    count, encode = ray.remote(lambda table: len(table)), ray.remote(num_returns=2)(_encode)
    lengths = ray.get([count.remote(table) for table in tables])
    if not sum(lengths):
        raise DataError("the dataset holds no rows", "give a dataset that is not empty", field=field)
    # Ray Data does not number rows. By the first number of every block ids and reports name the same row in every run.
    firsts, shared = accumulate(lengths, initial=1), ray.put(encoder)
    encoded = [encode.remote(table, first, shared) for table, first in zip(tables, firsts, strict=False)]
    sizes, skipped = dict[int, int](), SkippedRows()
    for of_block, reasons in ray.get([report for _, report in encoded]):
        sizes |= of_block
        skipped.excluded.update(reasons.excluded)
        skipped.broken.update(reasons.broken)
    kept = [*sizes][: encoder.form.size]
    if len(kept) == encoder.form.size:
        parts = skipped.excluded, skipped.broken
        skipped = SkippedRows(*({at: why for at, why in part.items() if at <= kept[-1]} for part in parts))
    _check(len(kept), skipped, encoder.form, field, None)
    made = ray.data.from_arrow_refs([rows for rows, _ in encoded])
    made.context.execution_options.preserve_order = True
    return made.limit(sum(sizes[number] for number in kept)), skipped


def _encode(table: pa.Table, first: int, encoder: RowEncoder) -> tuple[pa.Table, tuple[dict[int, int], SkippedRows]]:
    """Encode rows that are numbered from ``first`` on; also return how many experiences each gave, and the skipped."""
    encoded, skipped = encoder.encode(enumerate(rows_of(table), start=first))
    batch = to_batch([row for rows in encoded.values() for row in rows])
    return pa.Table.from_batches([batch]), ({number: len(rows) for number, rows in encoded.items()}, skipped)


def _check(kept: int, skipped: SkippedRows, form: RowFormat, config_key: str, value: str | None) -> None:
    if skipped.broken and form.on_broken == "fail":
        remedy = "fix or delete these lines, or set on_broken to 'skip'"
        raise broken_rows(skipped.broken, kept + len(skipped), remedy, field=config_key, value=value)
    if not kept:
        remedy = "check the reasons: they name what these rows lack"
        raise DataError(f"no usable row (left out: {dict(skipped.counts)})", remedy, field=config_key, value=value)
