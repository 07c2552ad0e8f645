"""Says who is waited for when nothing comes, and since when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from rayrft.waits import Wait, WaitReport, Waits

_LOOKS = 3
"""So many looks are taken in the time that nothing may come for, besides those at which a wait is due."""


class Silence:
    """Watches the waits of the Master, ``waits``, and those of the other parts.

    ``asks`` has for every part a call that gives its `WaitReport`, or anything else where it keeps none: that it
    answers counts, too. A wait is noted after ``patience_s`` in which nothing came of it, and again whenever that time
    has doubled.
    """

    def __init__(
        self,
        waits: Waits,
        asks: Mapping[str, Callable[[], Awaitable[Any]]],
        note: Callable[..., Awaitable[None]],
        patience_s: float,
    ) -> None:
        self._waits = waits
        self._signs = Waits("master")
        self._asks = asks
        self._note = note
        self._patience = patience_s
        self._asking: dict[str, asyncio.Future[Any]] = {}
        self._told: dict[tuple[str, str], float] = {}
        self.overdue: list[str] = []
        """What is waited for longer than it should be, a line each."""

    async def watch(self) -> None:
        """Never returns. Raises StorageError when what it has to say cannot be written."""
        try:
            while True:
                soon = await self._look()
                await asyncio.sleep(soon)
        finally:
            for asking in self._asking.values():
                asking.cancel()

    async def _look(self) -> float:
        """Note what is overdue; gives in how many seconds to look again."""
        reports = await self._ask()
        waits = quiet_waits([self._waits.report(), self._signs.report()], reports)
        late = [wait for wait in waits if wait.quiet_s >= self._patience]
        self.overdue = [describe(wait) for wait in late]
        self._told = {key: self._told[key] for key in map(_key, late) if key in self._told}
        if news := [wait for wait in late if wait.quiet_s >= self._due(wait)]:
            self._told.update({_key(wait): 2 * wait.quiet_s for wait in news})
            text = "; ".join(map(describe, news))
            await self._note(f"no progress: {text}", waiting=[asdict(wait) for wait in news])
        soonest = min((self._due(wait) - wait.quiet_s for wait in waits), default=self._patience)
        return min(max(soonest, 0.01 * self._patience), self._patience / _LOOKS)

    async def _ask(self) -> dict[str, WaitReport]:
        """The reports of the parts that answer soon. A part that does not is waited for like any other, from look to
        look."""
        for name, ask in self._asks.items():
            if name not in self._asking:
                self._asking[name] = asyncio.ensure_future(self._sign_of_life(name, ask))
        await asyncio.wait(self._asking.values(), timeout=self._patience / (2 * _LOOKS))
        reports = {}
        for name, asking in list(self._asking.items()):
            if asking.done():
                del self._asking[name]
                if isinstance(report := asking.result(), WaitReport):
                    reports[name] = report
        return reports

    async def _sign_of_life(self, name: str, ask: Callable[[], Awaitable[Any]]) -> Any:
        from ray.exceptions import RayActorError

        with self._signs.on(name, "a sign of life"):
            try:
                return await ask()
            except RayActorError:  # who watches for deaths says so
                return None

    def _due(self, wait: Wait) -> float:
        return self._told.get(_key(wait), self._patience)


def quiet_waits(own: Iterable[WaitReport], parts: Mapping[str, WaitReport]) -> list[Wait]:
    """The waits of all, those that cause others first. Who waits for a part to which something comes sees it move."""
    waits = (wait for report in (*parts.values(), *own) for wait in report.waits)
    judged = [
        replace(wait, quiet_s=min(wait.quiet_s, parts[wait.target].quiet_s)) if wait.target in parts else wait
        for wait in waits
    ]
    return sorted(judged, key=lambda wait: wait.target in parts)


def describe(wait: Wait) -> str:
    """A wait in a line."""
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - wait.quiet_s))
    more = f" and {wait.count - 1} more" if wait.count > 1 else ""
    return f"{wait.waiter} waits for {wait.target} ({wait.what}{more}): nothing for {wait.quiet_s:.0f} s, since {since}"


def _key(wait: Wait) -> tuple[str, str]:
    return wait.waiter, wait.target
