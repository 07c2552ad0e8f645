"""A judge: what it is asked, what counts as its verdict, and what no answer can make of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
from aiohttp import web

from rayrft.config.reward import RewardConfig
from rayrft.errors import ConfigError
from rayrft.experience import Task
from rayrft.rewards import RewardResult, Transcript
from rayrft.rewards.base import score
from rayrft.rewards.judge import Judge, Messages
from rayrft.rewards.scorer import Scorer
from tests.errors import about
from tests.rewards.planted_orders import ORDERS, planted
from tests.scripted import ScriptedChat, chat_endpoint, says, shown

TASK = Task.create("test", "Why is the sky blue?", "Rayleigh scattering.")


async def judged(model: ScriptedChat, response: str = "It scatters.", **options: Any) -> RewardResult:
    """What a judge that asks this model gives."""
    judge = Judge(auxiliary="judge", **options)
    judge.use({"judge": model})
    result = await score(judge, TASK, Transcript.of(TASK, response))
    assert all("json_schema" in sampling for _, _, sampling in model.asked)
    return result


async def test_a_grade_counts_only_in_the_form_that_was_asked_for() -> None:
    for reply, value in (
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
    ):
        result = await judged(says(reply))
        assert result.value == value and result.components["verdicts"] == (value is not None)


async def test_the_median_of_the_votes_that_can_be_read_counts_and_a_long_answer_is_cut() -> None:
    grades = iter(['{"grade": 10}', "no", '{"grade": 2}', '{"grade": 3}', '{"grade": 3}'])
    result = await judged(ScriptedChat(lambda messages, seed: next(grades)), votes=5, temperature=1.0)
    assert result.value == pytest.approx(0.3) and result.components["verdicts"] == 4
    await judged(model := says(""), "a" * 50 + "b" * 50, longest=20)
    assert shown(model.asked[0][0], "answer") == "a" * 10 + "\n[80 characters are left out]\n" + "b" * 10


async def test_votes_have_seeds_and_texts_have_marks_that_follow_from_the_answer() -> None:
    found: dict[str, list[tuple[int, str]]] = {}
    for response in ("a", "b", "a"):
        await judged(model := says(""), response, votes=3, temperature=1.0)
        seen = [(seed, re.findall(r"<answer-(\w+)>", asked[1]["content"])[0]) for asked, seed, _ in model.asked]
        assert len(set(seen)) == 3 and len({mark for _, mark in seen}) == 1
        assert found.setdefault(response, seen) == seen
    assert all(
        one != other for a, b in zip(found["a"], found["b"], strict=True) for one, other in zip(a, b, strict=True)
    )


async def test_two_answers_are_compared_in_both_orders() -> None:
    def prefers(better: str) -> ScriptedChat:
        return ScriptedChat(lambda asked, _: json.dumps({"better": "A" if better in shown(asked, "answer-A") else "B"}))

    for better, value in (("scatters", 1.0), ("Rayleigh", 0.0)):
        result = await judged(prefers(better), compare="reference")
        assert (result.value, result.components["consistent"]) == (value, 1.0)
    first = await judged(says('{"better": "A"}'), compare="reference")
    assert (first.value, first.components["consistent"]) == (0.5, 0.0), "who favours a position says nothing"
    tie = await judged(says('{"better": "tie"}'), compare="reference")
    assert (tie.value, tie.components["consistent"]) == (0.5, 1.0)


@pytest.mark.parametrize("order", ORDERS)
async def test_what_an_answer_orders_stays_between_tags_that_it_cannot_close(order: str) -> None:
    result = await judged(model := says('{"grade": 0}'), order)
    [([system, user], _, _)] = model.asked
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

    judge = Judge(auxiliary="judge")
    judge.use({"judge": ScriptedChat(reply)})
    rates = await planted(judge, tasks)
    assert (rates.refused, rates.answers, sum(rates.obeyed.values())) == (6, 8, count)


async def test_options_that_contradict_each_other_or_name_no_model_are_refused() -> None:
    for options, field in (
        ({}, "auxiliary"),
        ({"auxiliary": "a", "url": "http://b", "model": "c"}, "auxiliary"),
        ({"url": "http://b"}, "auxiliary"),
        ({"auxiliary": "a", "low": 3, "high": 3}, "low"),
        ({"auxiliary": "a", "calls": 0}, "calls"),
        ({"auxiliary": "a", "votes": 3}, "temperature"),
        ({"auxiliary": "a", "temperature": 2.5}, "temperature"),
        ({"auxiliary": "a", "template": "{what}"}, "template"),
        ({"auxiliary": "a", "compare": "other"}, "compare"),
    ):
        with pytest.raises(ConfigError, check=about(f"reward.options.{field}")):
            Judge(**options)
    config = RewardConfig(name="judge", options={"auxiliary": "judge"})
    with pytest.raises(ConfigError, check=about("reward.options.auxiliary", "judge")):
        Scorer(config, [], {"other": says("")})


async def test_a_judge_behind_the_api_of_openai_is_asked_for_json_with_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str | None, dict[str, Any]]] = []

    def reply(headers: Mapping[str, str], body: dict[str, Any]) -> str | web.Response:
        asked.append((headers.get("Authorization"), body))
        if "broken" in body["messages"][-1]["content"]:
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        return '{"reason": "so", "grade": 4}'

    monkeypatch.setenv("JUDGE_KEY", "secret")
    async with chat_endpoint(reply) as url:
        options = {"url": url, "model": "m", "key_variable": "JUDGE_KEY", "high": 4}
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
