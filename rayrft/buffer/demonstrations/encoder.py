"""Rows of expert data to experiences, by the same rules wherever the rows come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rayrft.buffer.demonstrations.conversations import Message, conversations
from rayrft.buffer.demonstrations.files import Row
from rayrft.buffer.experience import Experience, asked
from rayrft.buffer.images import paths
from rayrft.buffer.tokens import ChatTokenizer
from rayrft.config.demonstrations import RowFormat
from rayrft.errors import DataError

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
