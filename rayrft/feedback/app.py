"""The HTTP application of the feedback page: its files and its API."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field, field_validator

from rayrft.config import RunConfig
from rayrft.config.serve import FeedbackConfig
from rayrft.errors import DataError, RayrftError
from rayrft.feedback.agreement import measure_agreement
from rayrft.feedback.delivery import Delivery
from rayrft.feedback.items import Item, Queue, item_json
from rayrft.feedback.journal import feedback_folder, open_journal
from rayrft.feedback.judgements import (
    ROWS,
    Judgement,
    JudgementAdded,
    Judgements,
    JudgementUndone,
    Thumb,
    View,
    check_judgement,
    judgement_type,
)
from rayrft.feedback.run_rows import RunRows
from rayrft.json_lines import JsonLines
from rayrft.markup import image_content
from rayrft.registry import load_plugins
from rayrft.runtime.serving.http import ApiError, Body, HttpService, Route, add_page, parse

_SETTLE_S = 0.5
"""Seconds that a response waits for the run to take a judgement. A later one tells what was late or refused."""
_FRESH_S = 30.0
"""Seconds after which the rows of a running run are read again, when a person asks for an item."""
_EMPTY_S = 2.0
"""The same, when no item is left for that person."""
_REFERENCES_S = 5.0
"""Seconds that the start waits for reference answers, which may be on a remote store."""


class PersonRequest(BaseModel):
    """The body of ``/v1/me`` and ``/v1/leave``, and the base of the others."""

    model_config = ConfigDict(extra="forbid")

    person: str = Field(min_length=1, max_length=64)

    @field_validator("person")
    @classmethod
    def _printable(cls, name: str) -> str:
        if not name.strip().isprintable() or not name.strip():
            raise ValueError("must have printable characters")
        return name.strip()


class NextRequest(PersonRequest):
    """The body of ``/v1/next``."""

    view: View


class KeepRequest(PersonRequest):
    """The body of ``/v1/keep``."""

    item: str = Field(max_length=1024)


class UndoRequest(PersonRequest):
    """The body of ``/v1/undo``: without an id, the person's latest judgement."""

    id: str | None = Field(None, max_length=64)


class JudgeRequest(PersonRequest):
    """The body of ``/v1/judge``; ``rows``: experience ids of the item, in the order shown. Rules: `check_judgement`."""

    id: str = Field(min_length=8, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")
    item: str = Field(max_length=1024)
    rows: list[str] = Field(min_length=1, max_length=64)
    score: int | None = None
    thumb: Thumb | None = None
    ranking: list[str] = Field(default_factory=list, max_length=64)
    tie: bool = False
    edit: str | None = Field(None, max_length=1 << 20)
    labels: list[str] = Field(default_factory=list, max_length=9)
    comment: str = Field("", max_length=1 << 14)
    skipped: bool = False
    seconds: float = Field(0.0, ge=0, allow_inf_nan=False)


class FeedbackPage(HttpService):
    """The page over a run's rows and the journal in a folder; closing it releases the journal."""

    _delivery: Delivery
    """Set by `begin`."""

    def __init__(
        self, name: str, config: FeedbackConfig, key_digests: tuple[str, ...], rows: RunRows, folder: Path
    ) -> None:
        super().__init__(config, key_digests)
        self._name, self._settings, self.rows, self._folder = name, config, rows, folder
        self.judgements = Judgements(config)
        self.queue = Queue(config, self.judgements)
        self._before: dict[str, float | None] = {}
        self._unsettled: dict[str, list[Judgement]] = {}
        """Judgements whose outcome in the run their person does not know yet, by person."""
        self._references: dict[str, str] = {}
        self._notice: str | None = None
        self._read_at = 0.0
        self._reading: asyncio.Task[None] | None = None
        self._journal: JsonLines | None = None
        self._referring: asyncio.Task[None] | None = None
        self._started: asyncio.Task[None] | None = None
        self._closing = contextlib.AsyncExitStack()

    def routes(self) -> Iterator[Route]:
        for handle in (self._next, self._judge, self._undo, self._keep, self._leave, self._me):
            yield "POST", f"/v1/{handle.__name__[1:]}", handle, True
        yield "GET", "/v1/image", self._image, False
        yield "GET", "/v1/stats", self._stats, False

    def app(self) -> FastAPI:
        """Build the application; the page's files need no key."""
        app = super().app()
        add_page(app, __package__)
        return app

    def start(self) -> asyncio.Task[None]:
        """Start to read the journal and the run's rows, unless that was done; return the task."""
        if self._started is None or (self._started.done() and self._started.exception() is not None):
            self._started = asyncio.create_task(self._begin())
        return self._started

    async def begin(self) -> None:
        """Read the journal and the run's rows; returns at once if that was done."""
        await asyncio.shield(self.start())

    async def close(self) -> None:
        """Release the journal."""
        await self._closing.aclose()

    async def _begin(self) -> None:
        if self._journal is None:
            journal, entries = await asyncio.to_thread(open_journal, self._folder)
            self._journal = journal
            self._closing.callback(journal.close)
            for entry in entries:
                self.judgements.add(entry)
        await self._read()
        self._referring = asyncio.create_task(self._refer())
        await asyncio.wait({self._referring}, timeout=_REFERENCES_S)
        self._delivery = Delivery(self.rows, self.judgements, self._journal, self._before)
        self._closing.push_async_callback(self._delivery.close)

    async def _refer(self) -> None:
        try:
            self._references = await asyncio.to_thread(self.rows.references)
        except RayrftError as error:
            self._notice = f"Reference answers cannot be read: {error.problem}"

    async def _read(self) -> None:
        items = await asyncio.to_thread(lambda: self.queue.arrange(self.rows.groups()))
        for item in items:
            for answer in item.answers:
                self._before.setdefault(answer.experience_id, answer.reward)
        self.queue.fill(items)
        self._read_at = time.monotonic()

    async def _refresh(self, needed: bool) -> None:
        """Read the run's rows again if they are old; wait for that if new ones are needed."""
        old = time.monotonic() - self._read_at > (_EMPTY_S if needed else _FRESH_S)
        if (self._reading is None or self._reading.done()) and old and self._delivery.reachable:
            self._reading = asyncio.create_task(self._read())
        if needed and self._reading is not None:
            await asyncio.shield(self._reading)

    async def _asked(self, model: type[Body], request: Request) -> Body:
        """Return the body of a request, once the page has begun."""
        body = parse(model, await self.body(request))
        await self.begin()
        return body

    def _shown(self, item: Item | None) -> dict[str, Any] | None:
        return item_json(item, self._references.get(item.task_id)) if item is not None else None

    # Items.

    async def _next(self, request: Request) -> Response:
        body = await self._asked(NextRequest, request)
        await self._refresh(needed=self.queue.left(body.view) == 0)
        item = self.queue.take(body.person, body.view)
        return JSONResponse({"item": self._shown(item), **self._progress(body.person)})

    async def _keep(self, request: Request) -> Response:
        body = await self._asked(KeepRequest, request)
        return JSONResponse({"kept": self.queue.keep(body.person, body.item)})

    async def _leave(self, request: Request) -> Response:
        body = await self._asked(PersonRequest, request)
        self.queue.leave(body.person)
        return JSONResponse({})

    async def _image(self, request: Request) -> Response:
        """Return an image of an item, by its number."""
        await self.begin()
        asked = request.query_params
        item, number = self.queue.items.get(asked.get("item", "")), asked.get("number", "")
        images = item.answers[0].images if item is not None else ()
        path = images[int(number)] if number.isdecimal() and int(number) < len(images) else ""
        found = await asyncio.to_thread(image_content, path)
        if found is None:
            raise ApiError(404, "There is no such image.", code="image_not_found", param="number")
        return Response(found[0], media_type=found[1], headers={"X-Content-Type-Options": "nosniff"})

    # Judgements.

    async def _judge(self, request: Request) -> Response:
        body = await self._asked(JudgeRequest, request)
        if body.id in self.judgements.undone:
            return JSONResponse({"id": body.id, "outcome": "undone", **self._progress(body.person)})
        known = self.judgements.all.get(body.id)
        if known is not None and known.person != body.person:
            raise ApiError(409, "A judgement of somebody else has this id.", code="id_taken", param="id")
        others: list[str] = []
        if known is None:
            known = self._judgement(body, await self._item(body.item, body.rows))
            others = self.queue.others(known.item, known.person)
            await self._delivery.record(JudgementAdded(known))
            others = sorted({*others, *self.queue.others(known.item, known.person)})  # of the same moment
            self.queue.judged(known)
        delivered = await self._delivery.settle(known, _SETTLE_S)
        if delivered.outcome == "kept":
            self._unsettled.setdefault(known.person, []).append(known)
        return JSONResponse({"id": known.id, **asdict(delivered), "others": others, **self._progress(body.person)})

    async def _undo(self, request: Request) -> Response:
        body = await self._asked(UndoRequest, request)
        given = self.judgements.of_person(body.person)
        if body.id is not None:
            given = [each for each in [*given, self.judgements.undone.get(body.id)] if each and each.id == body.id]
        if not given or given[-1].person != body.person:
            raise ApiError(404, "Nothing to undo.", code="judgement_not_found", param="id")
        undone = given[-1]
        if undone.id not in self.judgements.undone:  # a client repeats the request if the response was lost
            await self._delivery.record(JudgementUndone(undone.id))
        item = None
        if body.person not in self.judgements.of_item(undone.item):
            with contextlib.suppress(ApiError):  # the item's rows are no longer in the log
                item = await self._item(undone.item, undone.rows)
                self.queue.undone(undone, item)
        delivered = await self._delivery.settle(undone, _SETTLE_S)
        draft = {name: value for name, value in asdict(undone).items() if name not in ("id", "person", "given_at")}
        shown = {"id": undone.id, "item": self._shown(item), "draft": draft}
        return JSONResponse({**shown, **asdict(delivered), **self._progress(body.person)})

    async def _item(self, key: str, rows: Sequence[str]) -> Item:
        """Return the item of a key, as it was shown. Raises ApiError 404 if there is none."""
        item = self.queue.items.get(key)
        if item is not None and {answer.experience_id for answer in item.answers} == set(rows):
            return item
        # The item has left the queue: it was shown before a restart, or the run has newer ones.
        view, _, name = key.partition(":")
        least, most = ROWS.get(cast(View, view), (1, 0))
        are_its = all(row == name or (view != "one" and row.startswith(f"{name}/")) for row in rows)
        if not (are_its and least <= len(rows) <= most):
            raise ApiError(404, f"There is no item {key!r} of these rows.", code="item_not_found", param="item")
        try:
            answers = tuple([await asyncio.to_thread(self.rows.find, row) for row in rows])
        except DataError as error:
            raise ApiError(404, str(error), code="item_not_found", param="rows") from None
        for answer in answers:
            self._before.setdefault(answer.experience_id, answer.reward)
        return Item(key, cast(View, view), "", answers)

    def _judgement(self, body: JudgeRequest, item: Item) -> Judgement:
        """Return the judgement in a request. Raises DataError, which names the field, if it does not fit the item."""
        given = judgement_type.validate_python({**body.model_dump(), "view": item.view, "given_at": time.time()})
        if unknown := set(given.labels) - set(self._settings.labels):
            known = ", ".join(self._settings.labels)
            raise DataError(f"unknown label {sorted(unknown)[0]!r}; known: {known}", field="labels")
        return check_judgement(given, self._settings)

    # Progress.

    async def _me(self, request: Request) -> Response:
        body = await self._asked(PersonRequest, request)
        about = self._settings.model_dump(include={"labels", "levels", "agreement", "rule", "lease_s"})
        about["rewards"] = self._settings.reward_range if self._settings.set_rewards else None
        return JSONResponse({"run": self._name, **about, "notice": self._notice, **self._progress(body.person)})

    async def _stats(self, request: Request) -> Response:
        await self.begin()
        people = Counter(each.person for each in self.judgements.all.values())
        outcomes = Counter(sent.outcome for sent in self.judgements.sent.values())
        kept = len(self.judgements.unsent()) + len(self.judgements.unsent_edits())
        sent = self.judgements.edits.values()
        edits = Counter("taken back" if each.withdrawn else each.outcome for each in sent)
        agreement = [asdict(figure) for figure in measure_agreement(self.judgements.all.values())]
        figures: dict[str, Any] = {"people": dict(people.most_common()), "rows": {**outcomes, "kept": kept}}
        requests = {"open": self.open, "requests": dict(self.outcomes)}
        return JSONResponse({**requests, **figures, "edits": edits, "agreement": agreement})

    def _progress(self, person: str) -> dict[str, Any]:
        given = self.judgements.of_person(person)
        counted = [each for each in given if not each.skipped]
        day = time.time() - 86_400
        mine = {
            "judged": len(counted),
            "skipped": len(given) - len(counted),
            "today": sum(each.given_at > day for each in counted),
            "edited": sum(each.edit is not None for each in counted),
            "seconds": sum(each.seconds for each in counted) / len(counted) if counted else None,
            "latest": given[-1].id if given else None,
        }
        left = {view: self.queue.left(view) for view in self.queue.totals}
        return {
            "mine": mine,
            "left": left,
            "totals": self.queue.totals,
            "running": self._delivery.reachable,
            "news": self._news(person),
        }

    def _news(self, person: str) -> list[dict[str, Any]]:
        """Return a person's judgements that were late or refused, of which earlier responses did not say so."""
        states = [(each, self._delivery.state(each)) for each in self._unsettled.pop(person, [])]
        if waiting := [each for each, state in states if state.outcome == "kept"]:
            self._unsettled[person] = waiting
        return [{"id": each.id, **asdict(state)} for each, state in states if state.outcome in ("late", "refused")]


def build_page(
    run: RunConfig, folder: Path, settings: FeedbackConfig, key_digests: tuple[str, ...], buffer: str
) -> FeedbackPage:
    """Build the page of the run in a folder, whose Buffer has this name, and start to read its rows."""
    load_plugins(run.plugins)
    rows = RunRows(folder, run, buffer, settings.max_groups, settings.demonstrations)
    page = FeedbackPage(run.name, settings, key_digests, rows, feedback_folder(folder))
    page.start()
    return page
