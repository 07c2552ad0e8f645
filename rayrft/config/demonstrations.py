"""Config of demonstrations: where expert and offline data is, and the columns of its rows."""

from __future__ import annotations

from pydantic import Field

from rayrft.config.base import invalid, section_rule
from rayrft.config.rows import RowsConfig, RowSelection


class RowFormat(RowSelection):
    """Columns of demonstration rows.

    By default the layout of a row is recognised by its columns (`rayrft.data.layouts`). If a config names any of the
    first five columns, a row with ``chosen`` and ``rejected`` is a preference pair. Else one with ``messages`` is a
    conversation, and any other is a ``prompt`` with its ``response``. A side is a text or a list of chat messages; a
    list that does not begin with the assistant contains its own prompt.
    """

    messages: str | None = None
    prompt: str | None = None
    response: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    """Names of columns; a dotted name is that of a nested value."""
    chat: bool | None = None
    """Whether texts become messages of a chat (true) or are tokenised as they are (false). By default those of named
    columns are a chat, and those of the layouts of TRL's standard data sets are not."""
    margin: str = "margin"
    """For reward models, the column that says by how much a pair's chosen answer is better, if known."""
    label: str = "label"
    """The column, true or false, that says whether an answer is good, for algorithms such as ``kto``."""
    tools: str = "tools"
    """The column with JSON schemas of functions, a list or its JSON, which the chat template shows."""


class DemonstrationsConfig(RowFormat, RowsConfig):
    """Expert rows of a file, data set or Ray Dataset, or from the answers of reserved tasks: then ``size`` is the
    number of tasks, which are never sampled for rollouts."""

    held_out: float = Field(0.0, ge=0.0)
    """Share (below 1) or number (from 1) of preference pairs that no stage trains on: all pairs of a prompt, or none. A
    stage that trains on the other pairs ranks them when it evaluates, and at its end."""
    wrong_share: float = Field(0.0, ge=0.0, le=1.0)
    """Fraction of rows with a wrong answer instead, to imitate a base model of mixed quality."""
    wrong_field: str | None = None
    """The field of a task's metadata that holds the wrong answer."""

    @section_rule
    def _one_origin(self) -> None:
        given = self.origins
        if not given and self.size is None:
            problem = "is required without 'size', 'dataset' and 'read'"
            raise invalid("path", problem, "give a file or folder, or size, a number of tasks")
        if len(given) > 1:
            raise invalid(given[1], f"is only valid without {given[0]!r}", "remove one of them")
        if (pairs := self.held_out) >= 1 and pairs % 1:
            problem = "must be a share below 1, or a whole number of pairs"
            raise invalid("held_out", problem, f"give {round(pairs)}", value=pairs)
        if self.wrong_share and (self.wrong_field is None or given):
            problem = "is only valid with wrong_field, for demonstrations made from tasks"
            raise invalid("wrong_share", problem, "set wrong_field and remove path", value=self.wrong_share)
