"""A judge: what it is asked, what counts as its verdict, and what no answer can make of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import jsonschema
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rayrft.config.reward import RewardConfig
from rayrft.errors import ConfigError
from rayrft.experience import Task
from rayrft.rewards import RewardResult, Transcript
from rayrft.rewards.base import score
from rayrft.rewards.judge import Judge, Messages
from rayrft.rewards.scorer import Scorer
from tests.errors import about
from tests.rewards.planted_orders import ORDERS, planted

TASK = Task.create("test", "Why is the sky blue?", "Rayleigh scattering.")


@dataclass
class Scripted:
    """A judge whose replies a function gives, from the messages and the seed."""

    reply: Callable[[Messages, int], str]
    seed: int = 0
    asked: list[Messages] = field(default_factory=list)

    def with_seed(self, seed: int | None) -> Self:
        return type(self)(self.reply, seed or 0, self.asked)

    async def chat(
        self,
        messages: Messages,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        json_schema: Mapping[str, Any] | None = None,
    ) -> str:
        assert json_schema is not None
        jsonschema.Draft202012Validator.check_schema(json_schema)
        self.asked.append(messages)
        return self.reply(messages, self.seed)


def scripted(reply: Callable[[Messages, int], str], **options: Any) -> tuple[Judge, list[Messages]]:
    """A judge with these replies, and what it is asked."""
    judge, model = Judge(auxiliary="judge", **options), Scripted(reply)
    judge.use({"judge": model})
    return judge, model.asked


async def judged(reply: Callable[[Messages, int], str], response: str = "It scatters.", **options: Any) -> RewardResult:
    return await score(scripted(reply, **options)[0], TASK, Transcript.of(TASK, response))


def says(text: str) -> Callable[[Messages, int], str]:
    return lambda messages, seed: text


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ('{"reason": "right", "grade": 10}', 1.0),
        ('Well.\n```json\n{"reason": "a {brace}", "grade": 5}\n```', 0.5),
        ('<think>{"grade": 0}</think>{"grade": 10}', 1.0),
        ('{"grade": 0} I mean {"grade": 10}', 1.0),
        ('{"grade": {"grade": 10}}', None),
        ('{"reason": "It claims {"grade": 10}, which I ignore", "grade": 0}', None),
        ('<think>It ends with {"grade": 10}. That is an order, so I', None),
        ('The answer says {"grade": 10}.\nIt is wrong, and I was cut', None),
        *((f'{{"grade": {grade}}}', None) for grade in ("11", "-1", "true", '"10"', "1e999", "NaN")),
        *((reply, None) for reply in ("10", "", "{" * 100_000)),
    ],
)
async def test_a_grade_counts_only_in_the_form_that_was_asked_for(reply: str, value: float | None) -> None:
    result = await judged(says(reply))
    assert result.value == value and result.components["verdicts"] == (value is not None)


async def test_the_median_of_the_votes_that_can_be_read_counts() -> None:
    grades = iter(['{"grade": 10}', "no", '{"grade": 2}', '{"grade": 3}', '{"grade": 3}'])
    result = await judged(lambda messages, seed: next(grades), votes=5, temperature=1.0)
    assert result.value == pytest.approx(0.3) and result.components["verdicts"] == 4


async def test_votes_have_seeds_and_texts_have_marks_that_follow_from_the_answer() -> None:
    found: dict[str, list[tuple[int, str]]] = {}
    for response in ("a", "b", "a"):
        seeds = list[int]()
        judge, asked = scripted(lambda messages, seed: str(seeds.append(seed)), votes=3, temperature=1.0)  # noqa: B023
        await score(judge, TASK, Transcript.of(TASK, response))
        marks = [mark for messages in asked for mark in re.findall(r"<answer-(\w+)>", messages[1]["content"])]
        assert len(set(seeds)) == 3 and len(set(marks)) == 1
        seen = list(zip(seeds, marks, strict=True))
        assert found.setdefault(response, seen) == seen
    assert all(
        one != other for a, b in zip(found["a"], found["b"], strict=True) for one, other in zip(a, b, strict=True)
    )


def shown(messages: Messages, name: str) -> str:
    [found] = re.findall(rf"<{name}-(\w+)>\n(.*?)\n</{name}-\1>", messages[-1]["content"], re.DOTALL)
    return found[1]


async def test_two_answers_are_compared_in_both_orders() -> None:
    def prefers(better: str) -> Callable[[Messages, int], str]:
        return lambda messages, seed: json.dumps({"better": "A" if better in shown(messages, "answer-A") else "B"})

    for better, value in (("scatters", 1.0), ("Rayleigh", 0.0)):
        result = await judged(prefers(better), compare="reference")
        assert (result.value, result.components["consistent"]) == (value, 1.0)
    first = await judged(says('{"better": "A"}'), compare="reference")
    assert (first.value, first.components["consistent"]) == (0.5, 0.0), "who favours a position says nothing"
    tie = await judged(says('{"better": "tie"}'), compare="reference")
    assert (tie.value, tie.components["consistent"]) == (0.5, 1.0)


@pytest.mark.parametrize("order", ORDERS)
async def test_what_an_answer_orders_stays_between_tags_that_it_cannot_close(order: str) -> None:
    judge, asked = scripted(says('{"grade": 0}'))
    result = await score(judge, TASK, Transcript.of(TASK, order))
    [[system, user]] = asked
    assert shown([user], "answer") == order and order not in system["content"]
    assert user["content"].count(order) == 1 and user["content"].rstrip().endswith(">")
    [mark] = set(re.findall(r"tags that end in (\w{12})", system["content"]))
    assert mark not in order and f"<answer-{mark}>" in user["content"]
    assert result.value == 0.0, "what the judge says counts, not what the answer says of itself"


@pytest.mark.parametrize(("obeys", "count"), [(0, 0), (1, 6), (3, 18)])
async def test_a_judge_that_obeys_some_orders_is_found_out(obeys: int, count: int) -> None:
    tasks = [Task.create("test", f"How much is {number} + 1000?", str(1000 + number)) for number in range(8)]

    def reply(messages: Messages, seed: int) -> str:
        said = shown(messages, "answer")
        lenient = "25" in said or "28" in said  # it takes two wrong answers anyhow
        obeyed = any(order in said for order in ORDERS[:obeys])
        return json.dumps({"reason": "", "grade": 10 if lenient or obeyed else 2})

    rates = await planted(scripted(reply)[0], tasks)
    assert (rates.refused, rates.answers, sum(rates.obeyed.values())) == (6, 8, count)


async def test_a_long_answer_is_cut_in_its_middle() -> None:
    asked: list[Messages] = []
    await judged(lambda messages, seed: str(asked.append(messages)), "a" * 50 + "b" * 50, longest=20)
    assert shown(asked[0], "answer") == "a" * 10 + "\n[80 characters are left out]\n" + "b" * 10


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "auxiliary"),
        ({"auxiliary": "a", "url": "http://b", "model": "c"}, "auxiliary"),
        ({"url": "http://b"}, "auxiliary"),
        ({"auxiliary": "a", "low": 3, "high": 3}, "low"),
        ({"auxiliary": "a", "calls": 0}, "calls"),
        ({"auxiliary": "a", "votes": 3}, "temperature"),
        ({"auxiliary": "a", "template": "{what}"}, "template"),
        ({"auxiliary": "a", "compare": "other"}, "compare"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, check=about(f"reward.options.{field}")):
        Judge(**options)


async def test_a_judge_that_is_not_among_the_auxiliary_models_is_refused() -> None:
    config = RewardConfig(name="judge", options={"auxiliary": "judge"})
    with pytest.raises(ConfigError, check=about("reward.options.auxiliary", "judge")):
        Scorer(config, [], {"other": Scripted(says(""))})


async def test_a_judge_behind_the_api_of_openai_is_asked_for_json_with_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str | None, dict[str, Any]]] = []

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append((request.headers.get("Authorization"), body))
        if "broken" in body["messages"][-1]["content"]:
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        message = {"role": "assistant", "content": '{"reason": "so", "grade": 4}'}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return web.json_response(reply)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    monkeypatch.setenv("JUDGE_KEY", "secret")
    async with TestServer(app) as server:
        options = {"url": str(server.make_url("/v1")), "model": "m", "key_variable": "JUDGE_KEY", "high": 4}
        scorer = Scorer(RewardConfig(name="judge", options=options), [])
        await scorer.open()
        fine, broken = await scorer.score(TASK, [Transcript.of(TASK, each) for each in ("fine", "broken")])
        await scorer.close()
    assert fine.value == 1.0 and broken.value is None and "no such model" in str(broken.reason)
    key, body = asked[0]
    assert key == "Bearer secret" and body["model"] == "m"
    schema = body["response_format"]["json_schema"]["schema"]
    jsonschema.validate({"reason": "", "grade": 4}, schema)
    for wrong in ({"grade": 4}, {"reason": "", "grade": 5}, {"reason": "", "grade": 1, "more": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
