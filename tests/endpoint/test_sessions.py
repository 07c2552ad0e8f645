"""Sessions become trajectories and groups: nothing is tokenised twice, and every row is trained, dropped or held."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorUnavailableError

from rayrft.buffer.validation import Fault, Limits, find_faults
from rayrft.config.serve import ServeConfig
from rayrft.endpoint import keeper as keeper_module
from rayrft.endpoint.keeper import RemoteSessions, SessionKeeper
from rayrft.endpoint.recording import Call, Choice, Conversation, OpenCall
from rayrft.endpoint.sessions import Sessions
from rayrft.errors import DataError, FeedbackRefused
from rayrft.experience import MASKED, VersionSpan, to_batch
from rayrft.explorer.engines.exchange import Completion
from tests.endpoint.scripted import MODEL, serve
from tests.errors import about
from tests.scripted import remote


def make(group_size: int = 1, *, drop_equal: bool = False, mask_truncated: bool = False, **config: Any) -> Sessions:
    return Sessions(
        ServeConfig(**config), "run/serve/x", group_size, drop_equal=drop_equal, mask_truncated=mask_truncated
    )


def answer(
    sessions: Sessions,
    begun: OpenCall,
    conversation: Conversation,
    *,
    now: float = 0.0,
    trained: bool = True,
    choices: int = 1,
    version: int = 0,
    stop_reason: str = "stop",
) -> Call:
    """Answer a call whose prompt is its prefix and three tokens; answers are of token 9, observations of token 5."""
    prefix = begun.prefix.token_ids if begun.prefix else ()
    completion = Completion((9, 9), (-0.5, -0.25), ((0, 2, version),), stop_reason)
    texts = [f"a{k}" if choices > 1 else "a" for k in range(choices)]
    like = {str: lambda text: text, tuple: lambda text: (text,)}[type(conversation)]
    said = (Choice(completion, like(text), "text") for text in texts)
    turns = ({"role": "user", "content": "?"},)
    call = Call(f"r{begun.number}", (*prefix, 5, 5, 5), conversation, turns, tuple(said), trained, "engine-1")
    sessions.answered(begun, call, now)
    return call


def talk(
    sessions: Sessions,
    session: str,
    said: Conversation,
    *,
    task: str | None = None,
    reward: float | None = None,
    now: float = 0.0,
    **options: Any,
) -> Call:
    """Begin a call and answer it, and reward the session."""
    call = answer(sessions, sessions.begin(session, task, said, now), said, now=now, **options)
    if reward is not None:
        sessions.feedback(session, reward, {}, now)
    return call


def rows(sessions: Sessions) -> list[Any]:
    groups, _ = sessions.take()
    return [row for group in groups for row in group.rows]


ANSWERED = (Choice(Completion((9, 9), (-0.5, -0.25), ((0, 2, 0),), "stop"), ("a",), "text"),)


class Counting:
    """The Buffer of a keeper: counts what it is given."""

    def __init__(self) -> None:
        self.dropped, self.rows, self.open = Counter[str](), 0, asyncio.Event()
        self.open.set()
        self.forgotten = asyncio.Queue[float]()

    async def forget(self, names: list[str], before: float) -> tuple[int, int]:
        self.forgotten.put_nowait(before)
        return 0, 0

    async def discard(self, name: str, counts: dict[str, int]) -> None:
        self.dropped += counts

    async def put(self, entries: list[Any], payload: list[Any]) -> list[list[Fault]]:
        await self.open.wait()
        self.rows += sum(entry.rows for entry in entries)
        return [[] for _ in entries]

    def keep(self, folder: Path, group_size: int = 1, **serve: Any) -> SessionKeeper:
        config = ServeConfig(**serve)
        return SessionKeeper(config, "run", group_size, remote(self), folder / "open_rows", drop_equal=False)


async def test_a_clock_that_is_set_drops_no_session_and_erases_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "_FORGET_EVERY_S", 0.01)
    buffer = Counting()
    keeper = buffer.keep(tmp_path, keep_days=7)
    await keeper.start()
    kept_since = await buffer.forgotten.get()
    sessions = RemoteSessions(remote(keeper), 60.0)
    begun = await sessions.begin("s", "task", ("u1",))
    later = time.time() + 1e9
    monkeypatch.setattr(time, "time", lambda: later)
    await sessions.answered(begun, Call("r1", (5,), ("u1",), (), ANSWERED, True, "engine-1"))
    left = keeper._sessions.next_expiry() - time.monotonic()
    assert 0 < left <= ServeConfig().reward_s
    while not buffer.forgotten.empty():
        buffer.forgotten.get_nowait()
    assert 0 < await buffer.forgotten.get() - kept_since < 86_400
    await keeper.close()
    for task in (keeper._expiring, keeper._forgetting):
        task.cancel()
    assert buffer.dropped == {"run_ended": 1}


async def test_calls_that_come_together_travel_together_and_a_cancelled_one_costs_no_other(tmp_path: Path) -> None:
    keeper = Counting().keep(tmp_path)
    travelled, change = list[int](), keeper.change

    async def counted(changes: list[Any]) -> list[OpenCall | None]:
        travelled.append(len(changes))
        return await change(changes)

    keeper.change = counted  # type: ignore[method-assign]
    sessions = RemoteSessions(remote(keeper), 60.0)
    calls = [asyncio.ensure_future(sessions.begin(str(number), None, ("u",))) for number in range(8)]
    await asyncio.sleep(0)
    calls[3].cancel()
    begun = await asyncio.gather(*calls, return_exceptions=True)
    assert travelled == [8] and isinstance(begun[3], asyncio.CancelledError)
    assert [call.session for call in begun if isinstance(call, OpenCall)] == [*"0124567"]
    ending = [sessions.failed(call, "timeout") for call in begun if isinstance(call, OpenCall)]
    await asyncio.gather(*ending)
    assert travelled == [8, 7] and (await sessions.stats()).calls == {"timeout": 7}
    keeper.change = None  # type: ignore[method-assign,assignment]
    broken = await asyncio.gather(*(sessions.begin(name, None, ("u",)) for name in "ab"), return_exceptions=True)
    assert [type(error) for error in broken] == [TypeError] * 2
    keeper.change = counted  # type: ignore[method-assign]
    assert (await sessions.begin("c", None, ("u",))).session == "c"


class AwayKeeper:
    """A keeper that cannot be reached for so many calls."""

    def __init__(self, keeper: SessionKeeper, calls: float) -> None:
        self.keeper, self.calls = keeper, calls

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> Any:
            self.calls -= 1
            if self.calls >= 0:
                raise ActorUnavailableError("it is being restarted", None)
            return await getattr(self.keeper, name)(*arguments)

        return call


async def test_while_the_keeper_is_away_clients_wait_for_a_while_and_are_then_asked_to_try_again(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayrft.runtime.handle._RETRY_S", 0.0)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    away = AwayKeeper(Counting().keep(tmp_path), 3)
    sessions = RemoteSessions(remote(away), 60.0)
    async with serve(tiny_model, sessions=sessions) as served:
        answered = await served.http.post("/v1/chat/completions", json=chat)
        assert answered.status_code == 200 and away.calls < 0
        sessions._patience_s, away.calls = 0.0, math.inf
        feedback = {"id": answered.json()["id"], "reward": 1.0}
        for path, body in [("/v1/chat/completions", chat), ("/v1/feedback", feedback)]:
            refused = await served.http.post(path, json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert refused.json()["error"]["code"] == "unavailable"
        away.calls = 0
        assert (await served.http.post("/v1/feedback", json=feedback)).status_code == 200


async def test_what_a_keeper_that_dies_has_open_is_counted_once_by_its_successor(tmp_path: Path) -> None:
    buffer = Counting()
    keeper = buffer.keep(tmp_path, group_size=2)
    sessions = RemoteSessions(remote(keeper), 60.0)
    for name in ("trained", "trained too", "on its way", "on its way too", "waits for its group", "has no reward"):
        if name == "on its way":
            buffer.open.clear()
        begun = await sessions.begin(name, name[:5], (name,))
        await sessions.answered(begun, Call(name, (5,), (name,), (), ANSWERED, True, "engine-1"))
        rewarding = asyncio.ensure_future(keeper.feedback(name, 1.0, {})) if name != "has no reward" else None
        if rewarding is not None and "way" not in name:
            await rewarding
    await sessions.begin("has no answer", None, ("u",))
    assert (buffer.rows, buffer.dropped) == (2, {})
    successor = buffer.keep(tmp_path, group_size=2)
    await successor.start()
    await successor.close()
    assert buffer.dropped == {"keeper_died": 5}
    third = buffer.keep(tmp_path)
    await third.start()
    await third.close()
    assert buffer.dropped == {"keeper_died": 5}


def test_calls_that_continue_each_other_are_one_row_with_answers_as_sampled() -> None:
    sessions, conversation = make(), ("tools", "u1")
    for turn in range(3):
        begun = sessions.begin("s", "task", conversation, 0.0)
        assert (begun.prefix is None) == (turn == 0)
        if begun.prefix:
            assert begun.prefix.length == len(conversation) - 1 and begun.prefix.engine == "engine-1"
        answer(sessions, begun, conversation, version=turn)
        conversation = (*conversation, "a", f"u{turn + 2}")
    assert sessions.feedback("r1", 0.75, {"style": 1.0}, 0.0) == "s"
    [row] = rows(sessions)
    assert row.token_ids.tolist() == [5, 5, 5, 9, 9] * 3 and row.prompt_length == 3
    assert row.action_mask.tolist() == [0, 0, 0, 1, 1] * 3
    assert row.logprobs.tolist() == [0, 0, 0, -0.5, -0.25] * 3
    assert row.weight_versions == (VersionSpan(3, 5, 0), VersionSpan(8, 10, 1), VersionSpan(13, 15, 2))
    assert (row.reward, row.reward_components, row.task_id) == (0.75, {"style": 1.0}, "task")
    assert row.labels == {"session_id": "s", "response_ids": "r1 r2 r3"}, "so that an application finds its row"
    assert [turn["role"] for turn in row.turns] == ["user", "assistant"] * 3
    assert not find_faults(to_batch([row]), Limits(10, 100, 2))


@pytest.mark.parametrize(
    "second",
    [
        ("tools", "u1"),  # the same again
        ("tools", "u1", "another answer", "u2"),
        ("other tools", "u1", "a", "u2"),
        ("tools", "edited", "a", "u2"),
        ("tools", "u1", "a"),  # nothing new
        "tools u1 a",
        (1, 2, 3),
    ],
)
def test_a_call_that_does_not_continue_an_earlier_one_is_a_row_of_its_own(second: Conversation) -> None:
    sessions = make()
    talk(sessions, "s", ("tools", "u1"))
    begun = sessions.begin("s", None, second, 0.0)
    assert begun.prefix is None
    answer(sessions, begun, second)
    sessions.feedback("s", 1.0, {}, 0.0)
    found = rows(sessions)
    assert len(found) == 2 and {row.reward for row in found} == {1.0}
    assert {row.repeat for row in found} == {"0"} and len({row.experience_id for row in found}) == 2


def test_a_call_of_a_session_with_many_rows_is_not_compared_with_each() -> None:
    class Counted(str):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return str(self) == other

        __hash__ = str.__hash__

    sessions = make()
    for number in range(100):
        talk(sessions, "s", ("tools", f"u{number}"))
    begun = sessions.begin("s", None, ("tools", Counted("u7"), "a", "more"), 0.0)
    assert begun.prefix is not None and begun.prefix.length == 3 and Counted.compared < 5


def test_two_calls_that_continue_the_same_one_do_not_share_its_row() -> None:
    sessions = make()
    talk(sessions, "s", ("t", "u"))
    longer = ("t", "u", "a", "v")
    first, second = (sessions.begin("s", None, longer, 0.0) for _ in range(2))
    assert first.prefix and second.prefix is None
    sessions.failed(first, "client_gone", 0.0)
    answer(sessions, second, longer)
    third = sessions.begin("s", None, longer, 0.0)
    assert third.prefix == first.prefix  # it is free again
    answer(sessions, third, longer)
    sessions.feedback("s", 1.0, {}, 0.0)
    assert sorted(len(row.token_ids) for row in rows(sessions)) == [5, 10]
    assert sessions.stats().calls == {"answered": 3, "client_gone": 1}


def test_other_choices_are_rows_that_any_later_call_may_continue() -> None:
    sessions = make()
    talk(sessions, "s", ("t", "u"), choices=3)
    talk(sessions, "s", ("t", "u", "a1", "v"), reward=1.0)
    found = rows(sessions)
    assert sorted(len(row.token_ids) for row in found) == [5, 5, 10]
    assert not find_faults(to_batch(found), Limits(10, 100, 0))


def test_answers_of_another_distribution_are_masked_and_a_row_of_them_alone_is_dropped() -> None:
    sessions = make()
    talk(sessions, "s", ("t", "u"))
    talk(sessions, "s", ("t", "u", "a", "v"), trained=False)
    talk(sessions, "s", ("t", "x"), trained=False, reward=1.0)
    groups, dropped = sessions.take()
    [row] = groups[0].rows
    assert row.token_ids.tolist() == [5, 5, 5, 9, 9] and dropped == {"not_trained": 1}


def test_sessions_of_a_task_make_a_group_and_others_those_that_begin_alike() -> None:
    sessions = make(2)
    named = [("s0", "t0", "u0"), ("s1", "t1", "u0"), ("s2", None, "u0"), ("s3", "t0", "u9"), ("s4", None, "u0")]
    for session, task, said in named:
        talk(sessions, session, ("t", said), task=task, reward=1.0)
    groups, dropped = sessions.take()
    assert [len(group.rows) for group in groups] == [2, 2] and not dropped
    assert groups[0].rows[0].task_id == "t0" and len({row.group_id for group in groups for row in group.rows}) == 2
    assert sessions.stats().ungrouped == 1
    sessions.expire(3600.0)
    assert sessions.take()[1] == {"no_group": 1}


def test_a_group_of_equal_rewards_is_dropped_if_nothing_can_be_learnt_from_it() -> None:
    sessions = make(2, drop_equal=True, group_by="any")
    for number, reward in enumerate((1.0, 0.7 + 0.2 + 0.1, 0.0, 1.0)):
        talk(sessions, f"s{number}", ("t", str(number)), reward=reward)
    groups, dropped = sessions.take()
    assert len(groups) == 1 and dropped == {"zero_variance": 2}


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_rows_that_were_cut_are_masked_where_the_run_masks_them(cut: int) -> None:
    sessions = make(2, mask_truncated=True)
    for number in range(2):
        reason = "length" if number < cut else "stop"
        talk(sessions, f"s{number}", ("t", "u"), task="task", stop_reason=reason, reward=float(number))
    groups, dropped = sessions.take()
    if cut == 2:
        assert not groups and dropped == {"truncated": 2}
    else:
        [group] = groups
        assert [row.status == MASKED for row in group.rows] == [cut == 1, False]
        assert (group.dropped["truncated"], dropped.total()) == (cut, 0)


def test_feedback_that_is_late_twice_unknown_or_no_number_is_refused_and_counted() -> None:
    sessions = make(reward_s=10.0)
    for session in ("s", "late"):
        call = talk(sessions, session, ("t", "u"))
    sessions.feedback("s", 1.0, {}, 5.0)
    with pytest.raises(FeedbackRefused):
        sessions.feedback("s", 0.0, {}, 5.0)
    assert sessions.next_expiry() == 10.0
    sessions.expire(9.9)
    assert sessions.stats().open == 1
    sessions.expire(10.0)
    with pytest.raises(FeedbackRefused, match="no_reward"):
        sessions.feedback("late", 1.0, {}, 10.0)
    with pytest.raises(DataError, check=about("id")):
        sessions.feedback("nobody", 1.0, {}, 10.0)
    with pytest.raises(DataError, check=about("reward")):
        sessions.feedback("s", float("nan"), {}, 10.0)
    with pytest.raises(DataError, check=about("components.x")):
        sessions.feedback("s", 1.0, {"x": float("inf")}, 10.0)
    assert sessions.stats().feedback == {"accepted": 1, "twice": 1, "late": 1, "unknown": 1, "invalid": 2}
    groups, dropped = sessions.take()
    assert len(groups) == 1 and dropped == {"no_reward": 1}
    # An id may be used again.
    talk(sessions, "late", ("t", "u"), now=11.0)
    # What is said of the one before is not said of this one.
    with pytest.raises(FeedbackRefused, match="no_reward"):
        sessions.feedback(call.response, 0.0, {}, 12.0)
    assert sessions.feedback("late", 1.0, {}, 12.0) == "late"
    with pytest.raises(FeedbackRefused, match="rewarded"):
        sessions.feedback("late", 1.0, {}, 12.0)


def test_the_default_reward_is_that_of_sessions_without_one_in_time() -> None:
    sessions = make(default_reward=-1.0, reward_s=1.0)
    talk(sessions, "s", ("t", "u"))
    sessions.expire(1.0)
    assert [row.reward for row in rows(sessions)] == [-1.0]


def test_a_reward_during_a_call_waits_for_its_answer_and_a_call_without_an_end_is_given_up() -> None:
    sessions = make(deadline_s=5.0)
    begun = sessions.begin("s", None, ("t", "u"), 0.0)
    sessions.feedback("s", 1.0, {}, 1.0)
    assert not sessions.take()[0]
    answer(sessions, begun, ("t", "u"), now=2.0)
    assert len(rows(sessions)) == 1
    lost = sessions.begin("lost", None, ("t", "u"), 3.0)
    assert sessions.next_expiry() == 13.0
    sessions.expire(13.0)
    answer(sessions, lost, ("t", "u"), now=14.0)
    sessions.expire(13.0 + 600.0)
    assert sessions.take()[1] == {"lost": 1} and sessions.stats().calls == {"answered": 1, "lost": 1, "late": 1}


def test_too_many_sessions_drop_the_one_that_is_idle_for_longest() -> None:
    sessions = make(max_sessions=2)
    for number in range(4):
        talk(sessions, f"s{number}", ("t", str(number)), now=number)
    assert sessions.take()[1] == {"too_many_sessions": 2} and sessions.stats().open == 2


def test_of_too_many_sessions_without_a_group_the_one_that_has_waited_longest_is_dropped() -> None:
    sessions = make(2, max_sessions=2, group_s=50.0)
    for number in range(3):
        talk(sessions, f"s{number}", ("t", str(number)), now=number, reward=float(number))
    assert sessions.take()[1] == {"no_group": 1} and sessions.stats().ungrouped == 2
    assert sessions.next_expiry() == 51.0
    talk(sessions, "again", ("t", "1"), now=10.0, reward=0.5)
    assert sorted(row.reward for row in rows(sessions)) == [0.5, 1.0]
    assert sessions.next_expiry() == 52.0
    sessions.expire(52.0)
    assert sessions.take()[1] == {"no_group": 1} and sessions.stats().ungrouped == 0


def test_a_session_is_forgotten_wherever_it_is() -> None:
    sessions = make(2)
    for _ in range(2):  # the first waits for its group as the second of its id begins
        call = talk(sessions, "s", ("t", "u"), task="x")
        if not sessions.stats().ungrouped:
            sessions.feedback("s", 1.0, {}, 0.0)
    sessions.begin("s", "x", ("t", "u", "a", "v"), 0.0)
    assert sessions.forget("nobody") == 0 and sessions.forget("s") == 2 and sessions.forget(call.response) == 0
    assert (sessions.stats().open, sessions.stats().ungrouped, sessions.take()) == (0, 0, ([], {"forgotten": 2}))
    sessions.expire(10_000.0)
    assert sessions.take()[1] == {}


@given(seed=st.integers(0, 10**6))
def test_in_any_order_every_row_is_in_a_group_or_dropped_once(seed: int) -> None:
    rng, now, begun_rows = random.Random(seed), 0.0, 0
    size = rng.choice([1, 2, 4])
    sessions = make(size, drop_equal=rng.random() < 0.3, reward_s=20.0, group_s=50.0, max_sessions=8)
    running: list[tuple[OpenCall, Conversation]] = []
    told: dict[str, Conversation] = {}
    kept, answered = list[Any](), 0
    for _ in range(300):
        now += rng.random()
        match rng.choice(["begin", "begin", "answer", "answer", "answer", "fail", "reward", "expire"]):
            case "begin":
                session = f"s{rng.randrange(12)}"
                said = told.get(session, ("t", f"u{rng.randrange(3)}"))
                said = (*said, "v") if len(said) > 2 and rng.random() < 0.8 else ("t", f"u{rng.randrange(3)}")
                running.append((sessions.begin(session, rng.choice([None, "x"]), said, now), said))
            case "answer" if running:
                begun, said = running.pop(rng.randrange(len(running)))
                answer(sessions, begun, said, now=now, trained=rng.random() < 0.8)
                told[begun.session] = (*said, "a")
                answered += 1
                begun_rows += begun.prefix is None
            case "fail" if running:
                sessions.failed(running.pop(rng.randrange(len(running)))[0], "client_gone", now)
            case "reward":
                with contextlib.suppress(DataError, FeedbackRefused):
                    sessions.feedback(f"s{rng.randrange(14)}", float(rng.randrange(2)), {}, now)
            case "expire":
                sessions.expire(now)
    groups, dropped = sessions.take()
    held = sessions.held
    for begun, _ in running:
        sessions.failed(begun, "client_gone", now)
    sessions.close()
    last_groups, lost = sessions.take()
    assert held == sum(len(group.rows) for group in last_groups) + lost.total() and sessions.held == 0
    groups += last_groups
    kept += [row for group in groups for row in group.rows]
    dropped += lost
    stats = sessions.stats()
    assert stats.open == stats.ungrouped == 0 and stats.calls.get("answered", 0) == answered
    assert dropped == stats.dropped and all(count > 0 for count in dropped.values())
    ids = [row.experience_id for row in kept]
    assert len(set(ids)) == len(ids)
    for group in groups:
        assert {row.repeat for row in group.rows} == {str(number) for number in range(size)}
    # A row begins with a call that continues none; a session without a row is dropped as one.
    assert begun_rows <= len(kept) + dropped.total() <= begun_rows + sum(stats.sessions.values())
    assert sum(int(np.count_nonzero(row.action_mask)) // 2 for row in kept) <= answered
    if kept:
        assert not find_faults(to_batch(kept), Limits(10, 10_000, 0))
