"""Sessions of the endpoint: their calls become trajectories, and sessions with rewards become groups.

Pure bookkeeping, with the time as an argument. A call whose conversation continues that of an earlier call of its
session continues its trajectory: the answer stays as it was sampled, and only what was said since is tokenised. Any
other call begins a further row of the session.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

import numpy as np

from rayrft.buffer.events import GroupReport
from rayrft.config.serve import ServeConfig
from rayrft.errors import DataError, FeedbackRefused
from rayrft.experience import TRUNCATED, Experience
from rayrft.explorer.exchange import Completion
from rayrft.explorer.trajectory import action_columns

Conversation = str | tuple[str, ...] | tuple[int, ...]
"""What a client has sent and got: a text, canonical messages (the first entry stands for their tools), or token ids.
One continues another if it begins with it."""

_REMEMBERED = 100_000
"""Sessions that have ended and are remembered, to tell late feedback from that for an unknown id."""


@dataclass(frozen=True)
class Prefix:
    """A trajectory that a call continues: its tokens, and how long a part of the conversation they are."""

    token_ids: tuple[int, ...]
    length: int
    engine: str | None
    """The engine that has it in its cache."""


@dataclass(frozen=True)
class Begun:
    """A call in progress, by session and number."""

    session: str
    number: int
    prefix: Prefix | None = None


@dataclass(frozen=True)
class Choice:
    """An answer: as it was sampled, how it continues the conversation, and as text."""

    completion: Completion
    said: Conversation
    text: str


@dataclass(frozen=True)
class Call:
    """A call that was answered. ``turns`` are its messages, for display, since those of the prefix."""

    response: str
    prompt: tuple[int, ...]
    conversation: Conversation
    turns: tuple[dict[str, str], ...]
    choices: tuple[Choice, ...]
    trained: bool
    """Whether it was sampled from the distribution that is trained."""
    engine: str | None = None


@dataclass(frozen=True)
class ServedGroup:
    """A group for the Buffer."""

    rows: list[Experience]
    report: GroupReport


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
class _Branch:
    """A row in the making."""

    token_ids: tuple[int, ...]
    prompt_length: int
    known: Conversation
    turns: list[dict[str, str]]
    answers: list[tuple[int, Completion]]
    """Those to train on, by their start index."""
    stop_reason: str
    engine: str | None
    busy: bool = False

    @property
    def end(self) -> int:
        """End of the last answer to train on."""
        start, completion = self.answers[-1]
        return start + len(completion.token_ids)


@dataclass
class _Session:
    task: str | None
    first: Conversation
    began: float
    running: dict[int, _Branch | None] = field(default_factory=dict)
    """Calls in progress, with what they continue."""
    branches: list[_Branch] = field(default_factory=list)
    touched: float = 0.0
    reward: float | None = None
    components: dict[str, float] = field(default_factory=dict)
    failed: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Finished:
    session: _Session
    branches: list[_Branch]
    reward: float
    since: float


class Sessions:
    """The sessions of one run's endpoint.

    ``name`` begins the ids of its groups, and must be another one in every life of the run. ``drop_equal`` drops groups
    without variance in their rewards.
    """

    def __init__(self, config: ServeConfig, name: str, group_size: int, *, drop_equal: bool) -> None:
        self._config = config
        self._name = name
        self._group_size = group_size
        self._drop_equal = drop_equal
        self._numbers, self._groups = count(), count()
        self._open: dict[str, _Session] = {}
        self._idle: OrderedDict[str, float] = OrderedDict()
        """Open sessions without a call in progress, and when they expire; the first to expire first."""
        self._running: OrderedDict[int, tuple[str, float]] = OrderedDict()
        """The session of every call in progress, and when the call is given up: its replica may have died."""
        self._ended: OrderedDict[str, str] = OrderedDict()
        """How sessions ended."""
        self._responses: OrderedDict[str, str] = OrderedDict()
        """The session of every response."""
        self._waiting: dict[Hashable, list[_Finished]] = {}
        self._formed: list[ServedGroup] = []
        self._dropped: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._how: Counter[str] = Counter()
        self._feedback: Counter[str] = Counter()

    def begin(self, session: str, task: str | None, conversation: Conversation, now: float) -> Begun:
        """Begin a call. It continues the longest trajectory of its session that it can and no other call does.

        A session that has ended begins anew under its id.
        """
        entry = self._open.get(session)
        if entry is None:
            self._ended.pop(session, None)
            entry = self._open[session] = _Session(task, conversation, now)
        self._idle.pop(session, None)
        entry.task = entry.task or task
        fitting = [
            branch
            for branch in entry.branches
            if not branch.busy
            and isinstance(conversation, type(branch.known))
            and len(conversation) > len(branch.known)
            and conversation[: len(branch.known)] == branch.known
        ]
        longest = max(fitting, key=lambda branch: len(branch.known), default=None)
        number = next(self._numbers)
        entry.running[number] = longest
        self._running[number] = session, now + 2 * self._config.deadline_s
        if longest is None:
            return Begun(session, number)
        longest.busy = True
        return Begun(session, number, Prefix(longest.token_ids, len(longest.known), longest.engine))

    def answered(self, begun: Begun, call: Call, now: float) -> None:
        """End a call with its answers; the first continues the trajectory, others are rows of their own."""
        if (entry := self._open.get(begun.session)) is None or begun.number not in entry.running:
            self._calls["late"] += 1
            return
        branch = entry.running.pop(begun.number)
        del self._running[begun.number]
        for choice in call.choices:
            ids = (*call.prompt, *choice.completion.token_ids)
            answer = [(len(call.prompt), choice.completion)] if call.trained and choice.completion.token_ids else []
            said = {"role": "assistant", "content": choice.text}
            if branch is None:
                branch = _Branch(ids, len(call.prompt), "", [], [], "", None)
                branch.turns = list(call.turns)
                entry.branches.append(branch)
            else:
                branch.token_ids = ids
                branch.turns += call.turns
            branch.turns.append(said)
            branch.answers += answer
            branch.known = call.conversation + choice.said  # type: ignore[operator]
            branch.stop_reason, branch.engine, branch.busy = choice.completion.stop_reason, call.engine, False
            branch = None
        self._responses[call.response] = begun.session
        if len(self._responses) > _REMEMBERED:
            self._responses.popitem(last=False)
        self._calls["answered"] += 1
        self._rest(begun.session, entry, now)

    def failed(self, begun: Begun, reason: str, now: float) -> None:
        """End a call without an answer."""
        if (entry := self._open.get(begun.session)) is None or begun.number not in entry.running:
            return  # it was answered, or given up
        self._calls[reason] += 1
        branch = entry.running.pop(begun.number)
        del self._running[begun.number]
        if branch is not None:
            branch.busy = False
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
        session = self._responses.get(name, name)
        entry = self._open.get(session)
        if entry is None and session not in self._ended:
            self._feedback["unknown"] += 1
            raise DataError(
                "no session or response has this id", field="id", value=name, remedy="give the id of a response"
            )
        problem = self._ended[session] if entry is None else "rewarded"
        if entry is None or entry.reward is not None:
            self._feedback["twice" if problem == "rewarded" else "late"] += 1
            raise FeedbackRefused(f"the session has ended: {problem}", field=name, value=problem)
        self._feedback["accepted"] += 1
        entry.reward, entry.components = reward, components
        if not entry.running:
            self._idle.pop(session, None)
            self._finish(session, entry, now)
        return session

    def expire(self, now: float) -> None:
        """End the calls that were given up and the sessions without a reward in time, and drop those whose group
        is not complete in time."""
        while self._running and (first := next(iter(self._running.items())))[1][1] <= now:
            self.failed(Begun(first[1][0], first[0]), "lost", now)
        while self._idle and next(iter(self._idle.values())) <= now:
            self._expire_oldest(now, "no_reward")
        for key in list(self._waiting):
            group = self._waiting[key]
            while group and group[0].since + self._config.group_s <= now:
                self._drop(len(group.pop(0).branches), "no_group")
            if not group:
                del self._waiting[key]

    def next_expiry(self) -> float:
        """Return the time at which `expire` has something to do; infinity if there is none."""
        groups = (group[0].since + self._config.group_s for group in self._waiting.values())
        calls = (until for _, until in islice(self._running.values(), 1))
        return min([*groups, *calls, *islice(self._idle.values(), 1)], default=math.inf)

    def close(self) -> None:
        """Drop all that has not become part of a group, as the run ends."""
        self._running.clear()
        for session, entry in list(self._open.items()):
            self._end(session, entry, "run_ended")
            self._drop(max(1, len(entry.branches)), "run_ended")
        for group in self._waiting.values():
            self._drop(sum(len(finished.branches) for finished in group), "run_ended")
        self._waiting.clear()

    def take(self) -> tuple[list[ServedGroup], Counter[str]]:
        """Return the groups formed, and the rows dropped by reason, since the last call."""
        groups, self._formed = self._formed, []
        dropped, self._dropped = self._dropped, Counter()
        return groups, dropped

    def stats(self) -> SessionStats:
        """Return the counts so far."""
        ungrouped = sum(map(len, self._waiting.values()))
        counts = (self._calls, self._how, self._feedback, self._lost)
        return SessionStats(len(self._open), ungrouped, *map(dict, counts))

    def _rest(self, session: str, entry: _Session, now: float) -> None:
        """Let a session wait for its next call or its reward, if no call is in progress."""
        if entry.running:
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
        trained = [branch for branch in entry.branches if branch.answers]
        if not trained:
            return self._drop_whole(entry, "not_trained")
        self._drop(len(entry.branches) - len(trained), "not_trained")
        assert entry.reward is not None  # checked by the callers
        group = self._waiting.setdefault(self._key(entry), [])
        group.append(_Finished(entry, trained, entry.reward, now))
        if len(group) == self._group_size:
            self._form(self._waiting.pop(self._key(entry)), now)

    def _form(self, members: list[_Finished], now: float) -> None:
        rewards = [member.reward for member in members]
        if self._drop_equal and len(set(rewards)) == 1:
            return self._drop(sum(len(member.branches) for member in members), "zero_variance")
        group_id, rows = f"{self._name}/{next(self._groups)}", list[Experience]()
        for number, member in enumerate(members):
            first = f"{group_id}/{number}"
            ids = [first] if len(member.branches) == 1 else [f"{first}/{k}" for k in range(len(member.branches))]
            rows += [
                _row(branch, member, name, group_id, now) for branch, name in zip(member.branches, ids, strict=True)
            ]
        report = GroupReport(
            rows=len(rows),
            reward_sum=sum(row.reward or 0.0 for row in rows),
            scored=len(rows),
            tokens=sum(int(np.count_nonzero(row.action_mask)) for row in rows),
            truncated=sum(row.stop_reason in TRUNCATED for row in rows),
        )
        self._formed.append(ServedGroup(rows, report))

    def _key(self, entry: _Session) -> Hashable:
        if entry.task is not None:
            return "task", entry.task
        return ("prompt", _digest(entry.first)) if self._config.group_by == "prompt" else ("any",)

    def _end(self, session: str, entry: _Session, how: str) -> None:
        del self._open[session]
        self._idle.pop(session, None)
        self._how[how] += 1
        self._ended[session] = how
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def _drop_whole(self, entry: _Session, reason: str) -> None:
        """Drop the rows of a session, or one row for a session that has none, by the failure of its last call."""
        if entry.branches:
            self._drop(len(entry.branches), reason)
        else:
            self._drop(1, next(reversed(entry.failed), reason))

    def _drop(self, rows: int, reason: str) -> None:
        if rows:
            self._dropped[reason] += rows
            self._lost[reason] += rows


def _row(branch: _Branch, member: _Finished, experience_id: str, group_id: str, now: float) -> Experience:
    end, entry = branch.end, member.session
    mask, logprobs, versions = action_columns(branch.answers, end)
    return Experience(
        experience_id=experience_id,
        group_id=group_id,
        task_id=entry.task or _digest(entry.first),
        token_ids=np.array(branch.token_ids[:end], np.int32),
        prompt_length=branch.prompt_length,
        action_mask=mask,
        logprobs=logprobs,
        weight_versions=versions,
        reward=member.reward,
        reward_components=entry.components,
        stop_reason=branch.stop_reason,
        turns=tuple(branch.turns),
        created_at=entry.began,
        finished_at=now,
    )


def _digest(conversation: Conversation) -> str:
    return hashlib.blake2b(json.dumps(conversation).encode(), digest_size=8).hexdigest()


def canonical(messages: Sequence[dict[str, object]]) -> tuple[str, ...]:
    """Return messages in a form in which equal ones are equal, whatever a client adds or leaves out."""
    return tuple(json.dumps(message, sort_keys=True) for message in messages)
