"""Rewards over HTTP: what is asked, what is replied, and what is refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from rayrft.config import read_config
from rayrft.config.serve import RewardServiceConfig
from rayrft.core.services import serve_rewards
from rayrft.endpoint.rewards import RewardEndpoint
from rayrft.errors import ConfigError
from rayrft.experience import Task
from rayrft.rewards import RewardResult, StepReward, Transcript
from rayrft.rewards.scorer import Rewards
from rayrft.runtime.serving import key_digest
from tests.errors import about

MATH = {"domain": "math", "task": {"prompt": "1 + 1?", "answer": "2"}, "response": "2"}


class Scripted:
    """Scores as a test says, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Task, list[Transcript]]] = []
        self.holding = asyncio.Event()
        self.holding.set()

    async def open(self) -> None: ...

    async def score(self, task: Task, transcripts: list[Transcript]) -> list[RewardResult]:
        self.asked.append((task, transcripts))
        await self.holding.wait()
        if task.answer == "broken":
            raise ZeroDivisionError("in the scorer")
        return [self._result(each.response, task) for each in transcripts]

    def _result(self, response: str, task: Task) -> RewardResult:
        if response == "hang":
            return RewardResult(None, reason="timeout", error=True, seconds=2.0)
        value, steps = float(response == task.answer), (StepReward(0, 1, 0.25),)
        return RewardResult(value, {"tags": 0.5}, turns=(1.0,), seconds=0.5, steps=steps)


def served(keys: tuple[str, ...] = ("sk-1",), **serve: Any) -> tuple[httpx.AsyncClient, Scripted]:
    """A client of an endpoint over scripted rewards of two domains."""
    config = RewardServiceConfig.model_validate(
        {"reward": {"domains": {"math": {"name": "math"}, "words": {"name": "exact"}}}, "serve": serve}
    )
    scripted = Scripted()
    pool = Rewards(config.reward, [], lambda: scripted)
    endpoint = RewardEndpoint(config, tuple(map(key_digest, keys)), pool, "0a1b")
    headers = {"Authorization": "Bearer sk-1"}
    transport = httpx.ASGITransport(endpoint.app())
    return httpx.AsyncClient(transport=transport, base_url="http://rewards", headers=headers), scripted


async def test_an_answer_has_its_reward_with_all_that_is_known_of_it() -> None:
    http, scripted = served()
    asked = {**MATH, "task": {**MATH["task"], "metadata": {"tests": ["a"]}}}  # type: ignore[dict-item]
    reply = (await http.post("/v1/score", json=asked)).json()
    rewards = {"value": 1.0, "shaping": 0.0, "components": {"tags": 0.5}, "turns": [1.0]}
    steps = {"steps": [{"turn": 0, "end": 1, "value": 0.25}]}
    rest = {"answer": None, "reason": None, "error": False, "seconds": 0.5, "version": "0a1b"}
    assert reply == {"object": "score", "domain": "math", **rewards, **steps, **rest}
    [(task, [transcript])] = scripted.asked
    assert (task.question, task.answer, task.domain, task.metadata) == ("1 + 1?", "2", "math", {"tests": ["a"]})
    assert transcript == Transcript.of(task, "2")


async def test_a_conversation_is_scored_whole() -> None:
    http, scripted = served()
    before = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    after = [{"role": "assistant", "content": "3"}, {"role": "user", "content": "Sure?"}]
    last = {"role": "assistant", "content": "2"}
    of_task = {"domain": "math", "task": {"messages": [*before, *after], "answer": "2"}, "response": "2"}
    of_answer = {"domain": "math", "task": {"prompt": "1 + 1?", "answer": "2"}, "messages": [*before, *after, last]}
    of_both = {**of_answer, "task": {"messages": [*before, *after], "answer": "2"}}
    for asked in (of_task, of_answer, of_both):
        assert (await http.post("/v1/score", json=asked)).json()["value"] == 1.0
    found = [transcripts[0] for _, transcripts in scripted.asked]
    assert all(list(each.turns) == [*before, *after, last] for each in found)
    assert [each.answers for each in found] == [["2"], ["3", "2"], ["2"]], "the others were given"
    assert scripted.asked[0][0].system == "Be brief."


async def test_a_list_is_scored_in_its_order_and_answers_to_one_question_together() -> None:
    http, scripted = served()
    words = {"domain": "words", "task": {"prompt": "a?", "answer": "a"}, "response": "a"}
    reply = (await http.post("/v1/score", json=[MATH, {**MATH, "response": "hang"}, words, MATH])).json()
    found = [(each["domain"], each["value"], each["reason"]) for each in reply["data"]]
    assert found == [("math", 1.0, None), ("math", None, "timeout"), ("words", 1.0, None), ("math", 1.0, None)]
    assert [len(transcripts) for _, transcripts in scripted.asked] == [2, 1, 1] and reply["version"] == "0a1b"
    stats = (await http.get("/v1/stats")).json()
    again = (await http.get("/v1/stats")).json()
    assert stats["domains"] == again["domains"], "counts stay"
    math = stats["domains"]["math"]
    assert (math["scored"], math["unknown"], math["errors"], math["seconds"], math["slowest_s"]) == (3, 1, 1, 3.0, 2.0)
    assert stats["domains"]["words"]["scored"] == 1 and stats["requests"] == {"200": 1}


@pytest.mark.parametrize(
    ("content", "status", "code", "param"),
    [
        ("{bad", 400, "invalid_json", None),
        ("", 400, "invalid_json", None),
        ("[]", 400, "invalid_value", None),
        ("3", 400, "invalid_value", None),
        ([MATH] * 1025, 400, "invalid_value", None),
        ({**MATH, "task": {"prompt": "1 + 1?"}}, 400, "missing_required_parameter", "task.answer"),
        ([MATH, {**MATH, "task": {"prompt": "?"}}], 400, "missing_required_parameter", "1.task.answer"),
        ({**MATH, "task": {"answer": "2"}}, 400, "invalid_value", "task"),
        ({**MATH, "task": {"prompt": "?", "messages": [{"role": "user", "content": "?"}], "answer": "2"}}, 400,
         "invalid_value", "task"),
        ({**MATH, "response": None}, 400, "invalid_value", None),
        ({**MATH, "response": 2}, 400, "invalid_value", "response"),
        ({**MATH, "answer": "2"}, 400, "invalid_value", "answer"),
        ({**MATH, "response": None, "messages": [{"role": "user", "content": "2"}]}, 400, "invalid_value", None),
        ({**MATH, "domain": "code"}, 404, "domain_not_found", "domain"),
        ({"task": MATH["task"], "response": "2"}, 404, "domain_not_found", "domain"),
        ([MATH, {**MATH, "domain": "code"}], 404, "domain_not_found", "1.domain"),
        ({**MATH, "response": "x" * 70_000}, 413, "request_too_large", None),
        ({**MATH, "task": {"prompt": "?", "answer": "broken"}}, 500, "internal_error", None),
    ],
)  # fmt: skip
async def test_what_cannot_be_scored_is_refused(content: Any, status: int, code: str, param: str | None) -> None:
    http, scripted = served(max_body_kib=64)
    if len(content) > 1000:
        http, scripted = served()
    text = content if isinstance(content, str) else json.dumps(content)
    response = await http.post("/v1/score", content=text)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param), error
    assert "Traceback" not in response.text and error["message"] and error["type"]
    assert status == 500 or not scripted.asked
    if status == 404:
        assert "known: math, words" in error["message"]


async def test_only_a_right_key_opens_and_the_health_check_needs_none() -> None:
    http, scripted = served()
    for header in ("", "Bearer", "Bearer sk-2", "Basic sk-1"):
        for ask in (http.post("/v1/score", json=MATH, headers={"Authorization": header}),
                    http.get("/v1/stats", headers={"Authorization": header})):  # fmt: skip
            response = await ask
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    assert (await http.get("/health", headers={"Authorization": ""})).status_code == 200
    assert not scripted.asked


async def test_what_takes_too_long_or_is_too_much_is_told_so_and_others_are_served() -> None:
    http, scripted = served(max_requests=1, deadline_s=0.2)
    scripted.holding.clear()
    first = asyncio.ensure_future(http.post("/v1/score", json=MATH))
    while not scripted.asked:  # noqa: ASYNC110 - what is waited for is in another task
        await asyncio.sleep(0)
    assert (await http.get("/v1/stats")).json()["domains"]["math"]["pending"] == 1
    second = await http.post("/v1/score", json=MATH)
    assert (second.status_code, second.headers["retry-after"]) == (429, "1")
    late = await first
    assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
    scripted.holding.set()
    assert (await http.post("/v1/score", json=MATH)).status_code == 200
    assert (await http.get("/v1/stats")).json()["domains"]["math"]["pending"] == 0


# The config


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"reward.placement": "pool"}, "reward.placement"),
        ({"reward.replicas.max": 0}, "reward.replicas.max"),
        ({"reward.replicas": {"min": 2, "max": 1}}, "reward.replicas.max"),
        ({"serve.model_name": "x"}, "serve.model_name"),
        ({"serve.host": "0.0.0.0"}, "serve.host"),
        ({"serve.proxy": "nginx"}, "serve.proxy"),
        ({"serve.proxy": "haproxy", "serve.host": "::1"}, "serve.proxy"),
        ({"name": "a:b"}, "name"),
        ({"rewards": {}}, "rewards"),
    ],
)
def test_a_wrong_config_is_refused_by_its_key(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, check=about(field)):
        read_config(RewardServiceConfig, {"reward": {"name": "math"}}, change)
    with pytest.raises(ConfigError, match="required", check=about("reward")):
        read_config(RewardServiceConfig, {})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"reward.name": "maths"}, "reward.name"),
        ({"reward.options": {"strictly": True}}, "reward.options"),
        ({"reward.name": "judge", "reward.options": {"auxiliary": "grader"}}, "auxiliary"),
        ({"serve.keys_file": "/nowhere"}, "serve.keys_file"),
        ({"serve.keys_env": "RAYRFT_NO_KEYS"}, "serve.keys_env"),
        ({"plugins": ["/nowhere.py"]}, "plugins"),
    ],
)
def test_what_cannot_be_served_is_refused(change: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayrft.core.services.connect", lambda: pytest.fail("it connects"))
    with pytest.raises(ConfigError, check=about(field)):
        serve_rewards(read_config(RewardServiceConfig, {"reward": {"name": "math"}}, change), say=lambda text: None)
