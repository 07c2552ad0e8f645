"""Sessions of the endpoint: their calls become rows, and sessions with rewards become groups.

Pure bookkeeping, with the time as an argument.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count, islice

import numpy as np

from rayrft.buffer.events import GroupReport
from rayrft.config.serve import ServeConfig
from rayrft.endpoint.recording import Call, Conversation, OpenCall, Row, SessionRows
from rayrft.errors import DataError, FeedbackRefused
from rayrft.experience import Experience, json_digest, reaches
from rayrft.explorer.scoring import ScoredGroup, mask_truncated
from rayrft.explorer.trajectory import action_columns

_REMEMBERED = 100_000
"""Ids of responses and ended sessions that are remembered: feedback for them is late, for others an unknown id."""


@dataclass(frozen=True)
class SessionStats:
    """Counts of the endpoint: ended ``calls`` by outcome, ended ``sessions`` by reason, and ``feedback`` by outcome."""

    open: int
    ungrouped: int
    """Sessions with a reward that wait for their group."""
    calls: dict[str, int]
    sessions: dict[str, int]
    feedback: dict[str, int]
    dropped: dict[str, int]
    """Rows that did not become part of a group, by reason."""


@dataclass
class _Identity:
    """The identity of a session: one id may name several sessions, one after the other."""

    session: str
    ended: str | None = None
    """The reason of its end."""


@dataclass(eq=False)
class _Session:
    number: int
    identity: _Identity
    task: str | None
    first: Conversation
    began: float = field(default_factory=time.time)
    calls: SessionRows = field(default_factory=SessionRows)
    reward: float | None = None
    components: dict[str, float] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)
    rows: list[Row] = field(default_factory=list)
    """Its rows to train on, once it has ended with a reward."""
    rewarded_at: float = 0.0


class Sessions:
    """The sessions of one run's endpoint.

    ``name`` begins the ids of its groups, and must differ between the attempts of the run. ``drop_equal`` drops groups
    without variance in their rewards, ``mask_truncated`` excludes rows whose last answer was cut from training.
    ``first_number`` is that of the first call: answers that come after a restart must not be taken for later calls.
    """

    def __init__(
        self,
        config: ServeConfig,
        name: str,
        group_size: int,
        *,
        drop_equal: bool,
        mask_truncated: bool = False,
        first_number: int = 0,
    ) -> None:
        self._config = config
        self._name = name
        self._group_size = group_size
        self._drop_equal, self._mask_truncated = drop_equal, mask_truncated
        self._numbers, self._groups = count(first_number), count()
        self._open: dict[str, _Session] = {}
        self._idle: OrderedDict[str, float] = OrderedDict()
        """Expiry times of open sessions without a call in progress, in their order."""
        self._running: OrderedDict[int, tuple[str, float]] = OrderedDict()
        """Sessions of calls in progress, and when the calls are given up, since their replicas may have died."""
        self._known: OrderedDict[str, _Identity] = OrderedDict()
        """Sessions by the ids of their responses, and by their own once they have ended."""
        self._waiting: dict[Hashable, list[_Session]] = {}
        """Sessions with a reward, by group."""
        self._aging: OrderedDict[int, _Session] = OrderedDict()
        """Those sessions by number; the longest waiting one first."""
        self._formed: list[ScoredGroup] = []
        self.held = 0
        """Rows that are neither part of a group nor dropped; a session without rows counts as one."""
        self._dropped: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._how: Counter[str] = Counter()
        self._feedback: Counter[str] = Counter()

    def begin(self, session: str, task: str | None, conversation: Conversation, now: float) -> OpenCall:
        """Begin a call. The id of an ended session names a new one."""
        entry = self._open.get(session)
        if entry is None:
            entry = self._open[session] = _Session(next(self._numbers), _Identity(session), task, conversation)
            self.held += 1
        self._idle.pop(session, None)
        entry.task = entry.task or task
        number = next(self._numbers)
        self._running[number] = session, now + 2 * self._config.deadline_s
        return OpenCall(session, number, entry.calls.begin(number, conversation))

    def answered(self, begun: OpenCall, call: Call, now: float) -> None:
        """End a call with its answers."""
        if (entry := self._open.get(begun.session)) is None or begun.number not in entry.calls.running:
            self._calls["late"] += 1
            return
        before = max(1, len(entry.calls.rows))
        entry.calls.answered(begun.number, call)
        self.held += max(1, len(entry.calls.rows)) - before
        del self._running[begun.number]
        self._remember(call.response, entry.identity)
        self._calls["answered"] += 1
        self._rest(entry, now)

    def failed(self, begun: OpenCall, reason: str, now: float) -> None:
        """End a call without an answer."""
        if (entry := self._open.get(begun.session)) is None or begun.number not in entry.calls.running:
            return  # the call was answered, or given up
        self._calls[reason] += 1
        entry.calls.failed(begun.number)
        del self._running[begun.number]
        entry.failed[reason] += 1
        self._rest(entry, now)

    def feedback(self, name: str, reward: float, components: dict[str, float], now: float) -> str:
        """Give the reward of a session, by its id or that of a response; return the session's id.

        Raises DataError for an unknown id or a reward that is not finite, and FeedbackRefused, whose value is the
        reason, if the session has a reward or has ended.
        """
        numbers = {"reward": reward, **{f"components.{part}": value for part, value in components.items()}}
        for where, number in numbers.items():
            if not math.isfinite(number):
                self._feedback["invalid"] += 1
                raise DataError("is not a finite number", field=where, value=number)
        found = self._find(name)
        if found is None:
            self._feedback["unknown"] += 1
            raise DataError("no session or response has this id", "give the id of a response", field="id", value=name)
        entry = self._open[found.session] if found.ended is None else None
        if entry is None or entry.reward is not None:
            problem = found.ended or "rewarded"
            self._feedback["twice" if problem == "rewarded" else "late"] += 1
            raise FeedbackRefused(f"the session has ended: {problem}", field=name, value=problem)
        self._feedback["accepted"] += 1
        entry.reward, entry.components = reward, components
        if not entry.calls.running:
            self._finish(entry, now)
        return found.session

    def opted_out(self, rows: int) -> None:
        """Count answers of a call that is not recorded."""
        self._calls["answered"] += 1
        self.held += rows
        self._drop(rows, "opted_out")

    def forget(self, name: str) -> int:
        """Drop a session that is not part of a group yet, by its id or that of a response; return its rows."""
        found, rows = self._find(name), 0
        if found is not None and found.ended is None:
            entry = self._open[found.session]
            for call in entry.calls.running:
                del self._running[call]
            self._end(entry, "forgotten")
            rows = max(1, len(entry.calls.rows))
        for member in [*self._aging.values()]:
            if member.identity is found or member.identity.session == name:
                self._leave_group(member)
                rows += len(member.rows)
        self._drop(rows, "forgotten")
        return rows

    def expire(self, now: float) -> None:
        """End calls that are given up and sessions without a reward in time, and drop sessions whose group is not
        complete in time."""
        while self._running and (first := next(iter(self._running.items())))[1][1] <= now:
            self.failed(OpenCall(first[1][0], first[0]), "lost", now)
        while self._idle and next(iter(self._idle.values())) <= now:
            self._expire_oldest(now, "no_reward")
        while self._aging and next(iter(self._aging.values())).rewarded_at + self._config.group_s <= now:
            self._drop_oldest()

    def next_expiry(self) -> float:
        """Return the time at which `expire` has something to do; infinity if there is none."""
        groups = (oldest.rewarded_at + self._config.group_s for oldest in islice(self._aging.values(), 1))
        calls = (until for _, until in islice(self._running.values(), 1))
        return min([*groups, *calls, *islice(self._idle.values(), 1)], default=math.inf)

    def close(self) -> None:
        """Drop all sessions that are not part of a group, as the run ends."""
        self._running.clear()
        for entry in list(self._open.values()):
            self._end(entry, "run_ended")
            self._drop(max(1, len(entry.calls.rows)), "run_ended")
        self._drop(sum(len(member.rows) for member in self._aging.values()), "run_ended")
        self._waiting.clear()
        self._aging.clear()

    def take(self) -> tuple[list[ScoredGroup], Counter[str]]:
        """Return the groups formed, and the rows dropped by reason, since the last call."""
        groups, self._formed = self._formed, []
        dropped, self._dropped = self._dropped, Counter()
        return groups, dropped

    def stats(self) -> SessionStats:
        counts = (self._calls, self._how, self._feedback, self._lost)
        return SessionStats(len(self._open), len(self._aging), *map(dict, counts))

    def _rest(self, entry: _Session, now: float) -> None:
        """Let a session wait for its next call or its reward, if no call is in progress."""
        if entry.calls.running:
            return
        if entry.reward is not None:
            return self._finish(entry, now)
        self._idle[entry.identity.session] = now + self._config.reward_s
        if len(self._idle) > self._config.max_sessions:
            self._expire_oldest(now, "too_many_sessions")

    def _expire_oldest(self, now: float, reason: str) -> None:
        entry = self._open[next(iter(self._idle))]
        if self._config.default_reward is not None:
            entry.reward = self._config.default_reward
            return self._finish(entry, now, "default_reward")
        self._end(entry, reason)
        self._drop_whole(entry, reason)

    def _finish(self, entry: _Session, now: float, how: str = "rewarded") -> None:
        """End a session that has a reward; its group is formed with the last of its sessions."""
        self._end(entry, how)
        entry.rows, entry.rewarded_at = [row for row in entry.calls.rows if row.answers], now
        if not entry.rows:
            return self._drop_whole(entry, "not_trained")
        self._drop(len(entry.calls.rows) - len(entry.rows), "not_trained")
        key = self._key(entry)
        group = self._waiting.setdefault(key, [])
        group.append(entry)
        self._aging[entry.number] = entry
        if len(group) == self._group_size:
            for member in self._waiting.pop(key):
                del self._aging[member.number]
            self._form(group)
        elif len(self._aging) > self._config.max_sessions:
            self._drop_oldest()

    def _leave_group(self, member: _Session) -> None:
        del self._aging[member.number]
        key = self._key(member)
        self._waiting[key].remove(member)
        if not self._waiting[key]:
            del self._waiting[key]

    def _drop_oldest(self) -> None:
        oldest = next(iter(self._aging.values()))
        self._leave_group(oldest)
        self._drop(len(oldest.rows), "no_group")

    def _form(self, members: list[_Session]) -> None:
        rewards = [member.reward or 0.0 for member in members]
        if self._drop_equal and reaches(min(rewards), max(rewards)):
            return self._drop(sum(len(member.rows) for member in members), "zero_variance")
        group_id, rows = f"{self._name}/{next(self._groups)}", list[Experience]()
        for number, member in enumerate(members):
            first = f"{group_id}/{number}"
            ids = [first] if len(member.rows) == 1 else [f"{first}/{k}" for k in range(len(member.rows))]
            rows += [_experience(row, member, id, group_id) for row, id in zip(member.rows, ids, strict=True)]
        scored = ScoredGroup(rows, Counter(), GroupReport.of(rows))
        if self._mask_truncated:
            scored = mask_truncated(scored)
        if not scored.rows:
            return self._drop(len(rows), "truncated")
        self._formed.append(scored)
        self.held -= len(rows)

    def _key(self, entry: _Session) -> Hashable:
        if entry.task is not None:
            return "task", entry.task
        return ("prompt", json_digest(entry.first)) if self._config.group_by == "prompt" else ("any",)

    def _find(self, name: str) -> _Identity | None:
        """Return the session with this id, or that of a response."""
        return self._open[name].identity if name in self._open else self._known.get(name)

    def _end(self, entry: _Session, how: str) -> None:
        session = entry.identity.session
        del self._open[session]
        self._idle.pop(session, None)
        self._how[how] += 1
        entry.identity.ended = how
        self._remember(session, entry.identity)

    def _remember(self, name: str, identity: _Identity) -> None:
        """Remember the session of an id; the oldest of too many is forgotten."""
        self._known[name] = identity
        self._known.move_to_end(name)
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def _drop_whole(self, entry: _Session, reason: str) -> None:
        """Drop the rows of a session; for a session without rows, one row by the failure of its last call."""
        if entry.calls.rows:
            self._drop(len(entry.calls.rows), reason)
        else:
            self._drop(1, next(reversed(entry.failed), reason))

    def _drop(self, rows: int, reason: str) -> None:
        if rows:
            self._dropped[reason] += rows
            self._lost[reason] += rows
            self.held -= rows


def _experience(row: Row, entry: _Session, experience_id: str, group_id: str) -> Experience:
    start, last = row.answers[-1]
    end = start + len(last.token_ids)
    mask, logprobs, versions = action_columns(row.answers, end)
    return Experience(
        experience_id=experience_id,
        group_id=group_id,
        task_id=entry.task or json_digest(entry.first),
        token_ids=np.array(row.token_ids[:end], np.int32),
        prompt_length=row.prompt_length,
        action_mask=mask,
        logprobs=logprobs,
        weight_versions=versions,
        reward=entry.reward,
        reward_components=entry.components,
        stop_reason=row.stop_reason,
        turns=tuple(row.turns),
        images=row.images,
        labels={"session_id": entry.identity.session, "response_ids": " ".join(row.responses)},
        created_at=entry.began,
        finished_at=time.time(),
    )
