"""The feedback page on Ray Serve: an application of its own for each run, which ends with whoever opened it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI

from rayrft.config import RunConfig
from rayrft.config.serve import FeedbackConfig
from rayrft.endpoint.deployment import deploy, request_counter
from rayrft.feedback.app import FeedbackPage
from rayrft.feedback.journal import FeedbackJournal, feedback_folder
from rayrft.feedback.run_rows import RunRows
from rayrft.registry import load_plugins
from rayrft.runtime.serving.applications import Owner, delete_with, on_head, start_serve


@dataclass(frozen=True)
class FeedbackFront:
    """Arguments of the page's process: the run's config and folder, the name of its Buffer's actor, in the owner's
    namespace, and the page's owner."""

    run: RunConfig
    folder: Path
    config: FeedbackConfig
    key_digests: tuple[str, ...]
    buffer: str
    owner: Owner

    @property
    def application(self) -> str:
        return f"{self.run.name}:feedback"


class FeedbackReplica:
    """The process that answers. When it is killed, Serve starts another, which goes on with the journal."""

    def __init__(self, front: FeedbackFront) -> None:
        config, settings = front.run, front.config
        load_plugins(config.plugins)
        rows = RunRows(
            front.folder, config, front.owner.namespace, front.buffer, settings.max_groups, settings.demonstrations
        )
        journal = FeedbackJournal(feedback_folder(front.folder))
        count = request_counter(front.application)
        self._page = FeedbackPage(config.name, settings, front.key_digests, rows, journal, count)
        self._watching = asyncio.create_task(delete_with(front.owner, front.application))
        self._beginning = asyncio.create_task(self._page.begin())

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._page.app()


def open_feedback(front: FeedbackFront) -> str:
    """Deploy the page; return its address, once it answers. Raises ConfigError as `start_serve` and `deploy` do."""
    return on_head(_open, front)


def _open(front: FeedbackFront) -> str:
    start_serve(front.config.host, front.config.port)
    url = deploy(FeedbackReplica, (front,), front.config, front.application, f"feedback/{front.run.name}")
    return url.removesuffix("v1")
