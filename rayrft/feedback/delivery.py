"""Delivery of judgements to the run, in the background; while its Buffer is away they wait."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import ParamSpec

from rayrft.errors import ActorDied, DataError, FeedbackRefused, RayrftError, RunNotFound
from rayrft.feedback.journal import entry_line
from rayrft.feedback.judgements import EditSent, Entry, Judgement, Judgements, RowSent, SendOutcome
from rayrft.feedback.run_rows import RunRows
from rayrft.json_lines import JsonLines
from rayrft.runtime.waits import cancel

P = ParamSpec("P")
log = logging.getLogger(__name__)
_AT_ONCE = 16
_AGAIN_S = 5.0
"""Seconds between looks for a run that was not there: Ray has no event for its return."""


@dataclass(frozen=True)
class DeliveryOutcome:
    """The outcome of a judgement in the run. ``kept``: it is in the journal, and the run does not have it yet."""

    outcome: str
    reason: str = ""


class Delivery:
    """Sends rewards, labels and edited answers to the run, and records in the journal that it has them.

    ``before`` are the rewards that rows had when they were shown, by experience id.
    """

    def __init__(
        self, rows: RunRows, judgements: Judgements, journal: JsonLines, before: dict[str, float | None]
    ) -> None:
        self._rows, self._judgements, self._journal, self._before = rows, judgements, journal, before
        self._wake = asyncio.Event()
        self._round: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run())
        self.reachable = True
        """Whether the run was there at the last look."""

    async def settle(self, judgement: Judgement, within_s: float) -> DeliveryOutcome:
        """Return the outcome of a judgement, or of its undoing, after at most ``within_s`` seconds."""
        self._wake.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._is_unsent(judgement):
                    await asyncio.shield(self._round)
                    if not self.reachable:
                        break
        return self.state(judgement)

    def state(self, judgement: Judgement) -> DeliveryOutcome:
        """Return the outcome of a judgement so far."""
        if self._is_unsent(judgement):
            return DeliveryOutcome("kept")
        known = self._judgements
        sent: list[RowSent | EditSent] = [known.sent[row] for row in judgement.rows if row in known.sent]
        edit = known.edits.get(judgement.id)
        sent += [edit] if edit is not None and edit.withdrawn != (judgement.id in known.all) else []
        for outcome in ("refused", "late"):
            if found := [each for each in sent if each.outcome == outcome]:
                return DeliveryOutcome(outcome, found[0].reason)
        return DeliveryOutcome("applied")

    async def close(self) -> None:
        await cancel(self._task)

    def _is_unsent(self, judgement: Judgement) -> bool:
        return any(map(self._judgements.is_unsent, judgement.rows)) or self._judgements.is_edit_unsent(judgement.id)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            # Callers from here on wait for the next round: this one may have looked before the run was there.
            done, self._round = self._round, asyncio.get_running_loop().create_future()
            try:
                self.reachable = await asyncio.to_thread(self._rows.running)
                if self.reachable:
                    await self._send()
            except (RunNotFound, ActorDied):
                self.reachable = False
            except RayrftError:
                log.exception("feedback was not sent")  # it stays in the journal
                self.reachable = False
            done.set_result(None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if self.reachable else _AGAIN_S):
                    await self._wake.wait()

    async def _send(self) -> None:
        sends = [partial(self._send_row, row) for row in self._judgements.unsent()]
        sends += [partial(self._send_edit, judgement) for judgement in self._judgements.unsent_edits()]
        sends += [partial(self._send_withdrawal, edit) for edit in self._judgements.unsent_withdrawals()]
        for start in range(0, len(sends), _AT_ONCE):
            done = await asyncio.gather(*(send() for send in sends[start : start + _AT_ONCE]), return_exceptions=True)
            for failure in filter(None, done):
                raise failure

    async def _send_row(self, row: str) -> None:
        target = self._judgements.target(row)
        outcome, reason = await _outcome(self._rows.feedback, row, target.reward, target.labels)
        await self.record(RowSent(row, target.reward, target.labels, outcome, reason, self._before.get(row)))

    async def _send_edit(self, judgement: Judgement) -> None:
        found: list[str] = []
        outcome, reason = await _outcome(lambda: found.append(self._rows.demonstrate(judgement)))
        await self.record(EditSent(judgement.id, outcome, reason, next(iter(found), "")))

    async def _send_withdrawal(self, edit: EditSent) -> None:
        outcome, reason = await _outcome(self._rows.withdraw, edit.demonstration)
        await self.record(replace(edit, outcome=outcome, reason=reason, withdrawn=True))

    async def record(self, entry: Entry) -> None:
        """Write an entry to the journal and add it to the judgements. Raises StorageError."""
        await self._journal.append_durably(entry_line(entry))
        self._judgements.add(entry)


async def _outcome(send: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> tuple[SendOutcome, str]:
    """Call a method of the run in a thread; return the outcome and its reason."""
    try:
        await asyncio.to_thread(send, *args, **kwargs)
    except FeedbackRefused as error:
        return "late", error.problem
    except DataError as error:
        return "refused", str(error)
    except RayrftError:  # such as a Buffer that is away: it is sent later
        raise
    except Exception as error:  # of the Buffer itself: it must not hold up everything else
        log.exception("the run failed on feedback")
        return "refused", f"{type(error).__name__}: {error}"
    return "applied", ""
