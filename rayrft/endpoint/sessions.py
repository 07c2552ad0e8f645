"""Sessions of the endpoint: their calls become rows, and sessions with rewards become groups.

Pure bookkeeping, with the time as an argument.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count, islice
from typing import TypeVar

import numpy as np

from rayrft.buffer.events import GroupReport
from rayrft.config.serve import ServeConfig
from rayrft.endpoint.recording import Begun, Call, Conversation, Row, SessionRows
from rayrft.errors import DataError, FeedbackRefused
from rayrft.experience import TRUNCATED, Experience, reaches
from rayrft.explorer.scoring import ScoredGroup, mask_truncated
from rayrft.explorer.trajectory import action_columns

K = TypeVar("K")
V = TypeVar("V")

_REMEMBERED = 100_000
"""Sessions that have ended, and ids, that are remembered, to tell late feedback from that for an unknown id."""


@dataclass(frozen=True)
class ServedGroup:
    """A group for the Buffer."""

    rows: list[Experience]
    report: GroupReport
    dropped: Counter[str]
    """Rows that are not trained on, by reason."""


@dataclass(frozen=True)
class SessionStats:
    """Counts of what came to the endpoint. ``calls`` has those that ended, by outcome; ``sessions`` by how they ended,
    and ``feedback`` by how it was taken."""

    open: int
    ungrouped: int
    """Sessions with a reward that wait for their group."""
    calls: dict[str, int]
    sessions: dict[str, int]
    feedback: dict[str, int]
    dropped: dict[str, int]
    """Rows that did not become part of a group, by reason."""


@dataclass
class _Session:
    number: int
    """One id may name several sessions, one after the other."""
    id: str
    task: str | None
    first: Conversation
    began: float = field(default_factory=time.time)
    calls: SessionRows = field(default_factory=SessionRows)
    reward: float | None = None
    components: dict[str, float] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Finished:
    session: _Session
    rows: list[Row]
    reward: float
    since: float


class Sessions:
    """The sessions of one run's endpoint.

    ``name`` begins the ids of its groups, and must be another one in every life of the run. ``drop_equal`` drops groups
    without variance in their rewards, ``mask_truncated`` excludes rows whose last answer was cut from training.
    """

    def __init__(
        self, config: ServeConfig, name: str, group_size: int, *, drop_equal: bool, mask_truncated: bool = False
    ) -> None:
        self._config = config
        self._name = name
        self._group_size = group_size
        self._drop_equal, self._mask_truncated = drop_equal, mask_truncated
        self._numbers, self._groups = count(), count()
        self._open: dict[str, _Session] = {}
        self._idle: OrderedDict[str, float] = OrderedDict()
        """Open sessions without a call in progress, and when they expire; the first to expire first."""
        self._running: OrderedDict[int, tuple[str, float]] = OrderedDict()
        """The session of every call in progress, and when the call is given up: its replica may have died."""
        self._ended: OrderedDict[int, str] = OrderedDict()
        """How sessions ended, by number."""
        self._known: OrderedDict[str, tuple[str, int]] = OrderedDict()
        """Id and number of the session, by the ids of its responses, and by its own once it has ended."""
        self._waiting: dict[Hashable, list[_Finished]] = {}
        """Sessions with a reward, by group."""
        self._aging: OrderedDict[int, Hashable] = OrderedDict()
        """The groups of those sessions, by number; the one that has waited longest first."""
        self._formed: list[ServedGroup] = []
        self._dropped: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._how: Counter[str] = Counter()
        self._feedback: Counter[str] = Counter()

    def begin(self, session: str, task: str | None, conversation: Conversation, now: float) -> Begun:
        """Begin a call. A session that has ended begins anew under its id."""
        entry = self._open.get(session)
        if entry is None:
            entry = self._open[session] = _Session(next(self._numbers), session, task, conversation)
        self._idle.pop(session, None)
        entry.task = entry.task or task
        number = next(self._numbers)
        self._running[number] = session, now + 2 * self._config.deadline_s
        return Begun(session, number, entry.calls.begin(number, conversation))

    def answered(self, begun: Begun, call: Call, now: float) -> None:
        """End a call with its answers."""
        if (entry := self._open.get(begun.session)) is None or begun.number not in entry.calls.running:
            self._calls["late"] += 1
            return
        entry.calls.answered(begun.number, call)
        del self._running[begun.number]
        _remember(self._known, call.response, (begun.session, entry.number))
        self._calls["answered"] += 1
        self._rest(begun.session, entry, now)

    def failed(self, begun: Begun, reason: str, now: float) -> None:
        """End a call without an answer."""
        if (entry := self._open.get(begun.session)) is None or begun.number not in entry.calls.running:
            return  # it was answered, or given up
        self._calls[reason] += 1
        entry.calls.failed(begun.number)
        del self._running[begun.number]
        entry.failed[reason] += 1
        self._rest(begun.session, entry, now)

    def feedback(self, name: str, reward: float, components: dict[str, float], now: float) -> str:
        """Give the reward of a session, by its id or that of a response; return the session's id.

        Raises DataError for an unknown id or a reward that is not finite, FeedbackRefused, whose value says why, if the
        session has one or has ended.
        """
        numbers = {"reward": reward, **{f"components.{part}": value for part, value in components.items()}}
        for where, number in numbers.items():
            if not math.isfinite(number):
                self._feedback["invalid"] += 1
                raise DataError("is not a finite number", field=where, value=number)
        session, session_number = self._known.get(name, (name, -1))
        if name in self._open:
            session, session_number = name, self._open[name].number
        entry = self._open.get(session)
        if entry is not None and entry.number != session_number:
            entry = None  # another one of this id, which has begun since
        if entry is None and session_number not in self._ended:
            self._feedback["unknown"] += 1
            raise DataError("no session or response has this id", "give the id of a response", field="id", value=name)
        problem = self._ended[session_number] if entry is None else "rewarded"
        if entry is None or entry.reward is not None:
            self._feedback["twice" if problem == "rewarded" else "late"] += 1
            raise FeedbackRefused(f"the session has ended: {problem}", field=name, value=problem)
        self._feedback["accepted"] += 1
        entry.reward, entry.components = reward, components
        if not entry.calls.running:
            self._idle.pop(session, None)
            self._finish(session, entry, now)
        return session

    def opted_out(self, rows: int) -> None:
        """Count answers of a call that is not recorded."""
        self._calls["answered"] += 1
        self._drop(rows, "opted_out")

    def forget(self, name: str) -> int:
        """Drop a session that is not part of a group yet, by its id or that of a response; return its rows."""
        session, number = self._known.get(name, (name, -1))
        entry, rows = self._open.get(session), 0
        if entry is not None and (name == session or entry.number == number):
            for call in entry.calls.running:
                del self._running[call]
            self._end(session, entry, "forgotten")
            rows = max(1, len(entry.calls.rows))
        waiting = [member for group in self._waiting.values() for member in group]
        for member in waiting:
            if member.session.number == number or member.session.id == name:
                key = self._aging.pop(member.session.number)
                self._waiting[key].remove(member)
                rows += len(member.rows)
                if not self._waiting[key]:
                    del self._waiting[key]
        self._drop(rows, "forgotten")
        return rows

    def expire(self, now: float) -> None:
        """End the calls that were given up and the sessions without a reward in time, and drop those whose group
        is not complete in time."""
        while self._running and (first := next(iter(self._running.items())))[1][1] <= now:
            self.failed(Begun(first[1][0], first[0]), "lost", now)
        while self._idle and next(iter(self._idle.values())) <= now:
            self._expire_oldest(now, "no_reward")
        while self._aging and self._oldest().since + self._config.group_s <= now:
            self._drop_oldest()

    def next_expiry(self) -> float:
        """Return the time at which `expire` has something to do; infinity if there is none."""
        groups = [self._oldest().since + self._config.group_s] if self._aging else []
        calls = (until for _, until in islice(self._running.values(), 1))
        return min([*groups, *calls, *islice(self._idle.values(), 1)], default=math.inf)

    def close(self) -> None:
        """Drop all that has not become part of a group, as the run ends."""
        self._running.clear()
        for session, entry in list(self._open.items()):
            self._end(session, entry, "run_ended")
            self._drop(max(1, len(entry.calls.rows)), "run_ended")
        for group in self._waiting.values():
            self._drop(sum(len(finished.rows) for finished in group), "run_ended")
        self._waiting.clear()
        self._aging.clear()

    def take(self) -> tuple[list[ServedGroup], Counter[str]]:
        """Return the groups formed, and the rows dropped by reason, since the last call."""
        groups, self._formed = self._formed, []
        dropped, self._dropped = self._dropped, Counter()
        return groups, dropped

    def stats(self) -> SessionStats:
        """Return the counts so far."""
        counts = (self._calls, self._how, self._feedback, self._lost)
        return SessionStats(len(self._open), len(self._aging), *map(dict, counts))

    def _rest(self, session: str, entry: _Session, now: float) -> None:
        """Let a session wait for its next call or its reward, if no call is in progress."""
        if entry.calls.running:
            return
        if entry.reward is not None:
            return self._finish(session, entry, now)
        self._idle[session] = now + self._config.reward_s
        if len(self._idle) > self._config.max_sessions:
            self._expire_oldest(now, "too_many_sessions")

    def _expire_oldest(self, now: float, reason: str) -> None:
        session, _ = self._idle.popitem(last=False)
        entry = self._open[session]
        if self._config.default_reward is not None:
            entry.reward = self._config.default_reward
            return self._finish(session, entry, now, "default_reward")
        self._end(session, entry, reason)
        self._drop_whole(entry, reason)

    def _finish(self, session: str, entry: _Session, now: float, how: str = "rewarded") -> None:
        """End a session that has a reward; its group is formed with the last of its sessions."""
        self._end(session, entry, how)
        trained = [row for row in entry.calls.rows if row.answers]
        if not trained:
            return self._drop_whole(entry, "not_trained")
        self._drop(len(entry.calls.rows) - len(trained), "not_trained")
        assert entry.reward is not None  # checked by the callers
        key = self._key(entry)
        group = self._waiting.setdefault(key, [])
        group.append(_Finished(entry, trained, entry.reward, now))
        self._aging[entry.number] = key
        if len(group) == self._group_size:
            for member in self._waiting.pop(key):
                del self._aging[member.session.number]
            self._form(group)
        elif len(self._aging) > self._config.max_sessions:
            self._drop_oldest()

    def _oldest(self) -> _Finished:
        """Return the session that has waited longest for its group."""
        return self._waiting[next(iter(self._aging.values()))][0]

    def _drop_oldest(self) -> None:
        _, key = self._aging.popitem(last=False)
        self._drop(len(self._waiting[key].pop(0).rows), "no_group")
        if not self._waiting[key]:
            del self._waiting[key]

    def _form(self, members: list[_Finished]) -> None:
        rewards = [member.reward for member in members]
        if self._drop_equal and reaches(min(rewards), max(rewards)):
            return self._drop(sum(len(member.rows) for member in members), "zero_variance")
        group_id, rows = f"{self._name}/{next(self._groups)}", list[Experience]()
        for number, member in enumerate(members):
            first = f"{group_id}/{number}"
            ids = [first] if len(member.rows) == 1 else [f"{first}/{k}" for k in range(len(member.rows))]
            rows += [_experience(row, member, id, group_id) for row, id in zip(member.rows, ids, strict=True)]
        report = GroupReport(
            rows=len(rows),
            reward_sum=sum(row.reward or 0.0 for row in rows),
            scored=len(rows),
            tokens=sum(int(np.count_nonzero(row.action_mask)) for row in rows),
            truncated=sum(row.stop_reason in TRUNCATED for row in rows),
        )
        scored = ScoredGroup(rows, Counter(), report)
        if self._mask_truncated:
            scored = mask_truncated(scored)
        if not scored.rows:
            return self._drop(len(rows), "truncated")
        self._formed.append(ServedGroup(scored.rows, report, scored.dropped))

    def _key(self, entry: _Session) -> Hashable:
        if entry.task is not None:
            return "task", entry.task
        return ("prompt", _digest(entry.first)) if self._config.group_by == "prompt" else ("any",)

    def _end(self, session: str, entry: _Session, how: str) -> None:
        del self._open[session]
        self._idle.pop(session, None)
        self._how[how] += 1
        _remember(self._ended, entry.number, how)
        _remember(self._known, session, (session, entry.number))

    def _drop_whole(self, entry: _Session, reason: str) -> None:
        """Drop the rows of a session, or one row for a session that has none, by the failure of its last call."""
        if entry.calls.rows:
            self._drop(len(entry.calls.rows), reason)
        else:
            self._drop(1, next(reversed(entry.failed), reason))

    def _drop(self, rows: int, reason: str) -> None:
        if rows:
            self._dropped[reason] += rows
            self._lost[reason] += rows


def _remember(entries: OrderedDict[K, V], key: K, value: V) -> None:
    """Set an entry; the oldest of too many is forgotten."""
    entries[key] = value
    entries.move_to_end(key)
    if len(entries) > _REMEMBERED:
        entries.popitem(last=False)


def _experience(row: Row, member: _Finished, experience_id: str, group_id: str) -> Experience:
    start, last = row.answers[-1]
    end, entry = start + len(last.token_ids), member.session
    mask, logprobs, versions = action_columns(row.answers, end)
    return Experience(
        experience_id=experience_id,
        group_id=group_id,
        task_id=entry.task or _digest(entry.first),
        token_ids=np.array(row.token_ids[:end], np.int32),
        prompt_length=row.prompt_length,
        action_mask=mask,
        logprobs=logprobs,
        weight_versions=versions,
        reward=member.reward,
        reward_components=entry.components,
        stop_reason=row.stop_reason,
        turns=tuple(row.turns),
        labels={"session_id": entry.id, "response_ids": " ".join(row.responses)},
        created_at=entry.began,
        finished_at=time.time(),
    )


def _digest(conversation: Conversation) -> str:
    return hashlib.blake2b(json.dumps(conversation).encode(), digest_size=8).hexdigest()
