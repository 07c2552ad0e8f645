"""What operators ask: answered at once for many rows, the same again, and without harm where a model fails."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rayrft.config.auxiliary import AuxiliaryConfig
from rayrft.config.pipelines import EndpointConfig
from rayrft.data.tables import json_field
from rayrft.errors import ActorDied, ConfigError, OperatorFailed, OperatorTimeout, RequestRefused
from rayrft.pipelines import Context
from rayrft.pipelines.run.models import AnswerJournal, AskedModel, ModelServer
from tests.errors import about
from tests.pipelines.asked import Scripted, ran, says
from tests.pipelines.small import OWN, linked, operator, rows

GRADE = '{"reason": "", "grade": 7}'


async def hang() -> str:
    await asyncio.Event().wait()
    raise AssertionError


def texts(count: int) -> pa.RecordBatch:
    return rows(answer=[f"answer {number}" for number in range(count)])


@pytest.mark.parametrize("calls", [500, 20])
def test_as_many_rows_are_asked_at_once_as_the_model_takes(calls: int) -> None:
    together, running, most = asyncio.Barrier(calls), 0, 0

    async def reply() -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await together.wait()  # for ever, unless so many are asked at a time
        running -= 1
        return GRADE

    model = Scripted(lambda messages, seed: reply())
    found, _, _ = ran("judged", texts(1000), {"judge": model}, calls=calls, model="judge", least=7)
    assert len(found) == 1000 and found[0]["grade"] == 7.0 and most == calls


@pytest.mark.parametrize("least", [29, 57, 58])
def test_the_lowest_grade_is_kept_on_any_scale(least: int) -> None:
    judge = says(f'{{"reason": "", "grade": {least}}}')
    found, _, _ = ran("judged", texts(1), {"judge": judge}, model="judge", low=0, high=100, least=least)
    assert len(found) == 1


def test_the_same_rows_are_asked_the_same_in_whatever_batches() -> None:
    seen = []
    for size in (3, 100):
        model = Scripted(lambda messages, seed: f'{{"reason": "", "grade": {seed % 11}}}')
        found, _, _ = ran(
            "judged", texts(20), {"judge": model}, batch_rows=size, model="judge", least=5, votes=3, temperature=1.0
        )
        seen.append((found, sorted(str(each) for each in model.asked)))
    assert seen[0] == seen[1] and 0 < len(seen[0][0]) < 20


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RequestRefused("the prompt has 900 tokens"), "no answer of the judge: the prompt has 900 tokens"),
        (None, "no answer of the judge: no answer within 0.2 s"),
    ],
)
def test_a_failed_request_is_its_rows_problem(error: Exception | None, reason: str) -> None:
    async def fail() -> str:
        if error is not None:
            raise error
        return await hang()

    model = Scripted(lambda messages, seed: fail() if "answer 1\n" in messages[1]["content"] else GRADE)
    settings = {"answer_s": 0.2}
    options = {"settings": settings, "model": "judge", "least": 0}
    found, report, gone = ran("judged", texts(3), {"judge": model}, **options)
    assert [row["answer"] for row in found] == ["answer 0", "answer 2"] and [why for _, why in gone] == [reason]
    found, report, gone = ran("judged", texts(3), {"judge": model}, **options, without="keep")
    assert [row["grade"] for row in found] == [7.0, None, 7.0] and not gone
    assert report.notes == {"no answer of the judge": 1} and report.noted == [reason]


def test_a_dead_engine_fails_the_operator_and_is_named() -> None:
    async def die() -> str:
        raise ActorDied("the engine failed to answer", field="auxiliary-judge-0")

    with pytest.raises(OperatorFailed, check=about("operators.0.judged", "auxiliary-judge-0")) as caught:
        ran("judged", texts(5), {"judge": Scripted(lambda m, s: die())}, model="judge", least=5)
    assert "the engine failed to answer" in str(caught.value) and "5 rows" in str(caught.value)


def test_a_model_that_answers_nothing_any_more_counts_as_dead_and_what_it_answered_is_kept(tmp_path: Path) -> None:
    answered = 40
    model: Scripted = Scripted(lambda m, s: GRADE if len(model.asked) <= answered else hang())
    settings = {"answer_s": 0.05, "journal": tmp_path / "answers.jsonl"}
    with pytest.raises(OperatorFailed, match="32 requests in a row had no answer", check=about("operators.0.judged")):
        ran("judged", texts(100), {"judge": model}, calls=8, settings=settings, model="judge", least=5)
    again = says(GRADE)
    found, _, _ = ran("judged", texts(100), {"judge": again}, settings=settings, model="judge", least=5)
    assert len(found) == 100 and len(again.asked) == 100 - answered


def test_a_few_failures_between_answers_do_not_count_as_death() -> None:
    model: Scripted = Scripted(lambda m, s: GRADE if len(model.asked) % 10 == 0 else hang())
    settings = {"answer_s": 0.01}
    _, _, gone = ran("judged", texts(60), {"judge": model}, calls=1, settings=settings, model="judge", least=5)
    assert len(gone) == 54


def test_an_operator_that_asks_and_then_hangs_is_stopped() -> None:
    with pytest.raises(OperatorTimeout, check=about("operators.0.asks_and_hangs")):
        ran("asks_and_hangs", texts(1), {"judge": says("yes")}, deadline_s=0.5, plugins=[OWN])


async def test_an_endpoint_is_asked_again_and_what_it_does_not_answer_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WRITER_KEY", "secret")
    tries = Counter[str]()

    async def complete(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        body = await request.json()
        text = body["messages"][-1]["content"]
        kind = next((word for word in ("busy", "broken", "html", "null", "long", "list") if word in text), "fine")
        tries[kind] += 1
        if kind == "busy" and tries[kind] < 3:
            return web.json_response({"error": {"message": "slow down"}}, status=429, headers={"retry-after": "0.01"})
        if kind == "broken":
            return web.Response(status=500, text="oh no", headers={"retry-after": "0.01"})
        if kind == "html":
            return web.Response(text="<html>welcome</html>", content_type="text/html")
        if kind == "null":
            return web.json_response({"choices": None})
        if kind == "list":
            return web.json_response({"choices": [{"message": {"content": [1, 2]}}]})
        if kind == "long":
            return web.json_response({"error": {"message": "too many tokens"}}, status=400)
        message = {"role": "assistant", "content": GRADE}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    given = rows(answer=["fine", "busy", "broken", "html", "null", "list", *["long"] * 40])
    async with TestServer(app) as server:
        url = str(server.make_url("/v1"))
        endpoint = EndpointConfig(url=url, model="m", key_variable="WRITER_KEY", retries=2, calls=2)
        settings = {"endpoints": {"judge": endpoint}}
        found, _, gone = await asyncio.to_thread(ran, "judged", given, {}, settings=settings, model="judge", least=5)
    assert [row["answer"] for row in found] == ["fine", "busy"] and tries["busy"] == tries["broken"] == 3
    reasons = [reason.removeprefix("no answer of the judge: ") for _, reason in gone]
    assert reasons[0].startswith("status 500") and "welcome" in reasons[1]
    assert "not a chat completion" in reasons[2] and "not a chat completion" in reasons[3]
    assert len(reasons) == 44, "what is too long for it does not make it dead"
    assert all(each.startswith("status 400") and "too many tokens" in each for each in reasons[4:])


def test_an_endpoint_that_is_not_there_fails_the_operator() -> None:
    endpoint = EndpointConfig(url="http://127.0.0.1:9/v1", model="m", retries=0)
    with pytest.raises(OperatorFailed, match="Connection", check=about("operators.0.judged", "judge")):
        ran("judged", texts(40), {}, settings={"endpoints": {"judge": endpoint}}, model="judge", least=5)


SCORED = Context(models=["a"], scores=True)


@pytest.mark.parametrize(
    ("name", "options", "context", "field"),
    [
        ("judged", {"model": "b", "least": 5}, Context(models=["a"]), ".model"),
        ("judged", {"least": 5}, Context(), ".model"),
        ("judged", {"least": 50}, Context(models=["a"]), ".least"),
        ("judged", {"least": 5, "votes": 3}, Context(models=["a"]), ".temperature"),
        ("judged", {"least": 5, "template": "{x}"}, Context(models=["a"]), ".template"),
        ("paraphrase", {}, Context(models=["a"]), ""),
        ("paraphrase", {"solver": "b"}, SCORED, ".solver"),
        ("paraphrase", {"least": 5}, SCORED, ".least"),
        ("paraphrase", {"answer": "mixed"}, SCORED, ".answer"),
        ("paraphrase", {"question": "q"}, SCORED, ".question"),
        ("hinted_solutions", {"hint": "h"}, SCORED, ".hinted_solutions"),
        ("corrected_answers", {}, SCORED, ".response"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_starts(
    name: str, options: dict[str, Any], context: Context, field: str
) -> None:
    batch = rows(question=["q"], answer=["a"]).append_column(json_field("mixed"), pa.array(['"London"']))
    with pytest.raises(ConfigError, check=about(f"operators.0{field}")):
        linked(batch, operator(name, **{"model": "a", **options}), context=context)


SAMPLING = ({"max_tokens": 9}, {"temperature": 0.5})


@pytest.mark.parametrize(
    ("at_endpoint", "changed"),
    [*((there, changed) for there in (True, False) for changed in SAMPLING), (False, {"max_length": 900})],
)
async def test_a_model_is_asked_again_once_it_is_to_answer_otherwise(
    at_endpoint: bool, changed: dict[str, Any], tmp_path: Path
) -> None:
    journal = AnswerJournal(tmp_path / "answers.jsonl")

    async def asked(**settings: Any) -> int:
        model = says("an answer")
        if at_endpoint:
            known = AskedModel.at_endpoint(EndpointConfig(url="http://127.0.0.1:9/v1", model="m", **settings))
            given = replace(known, chat=model)
        else:
            given = AskedModel.on_engines(model, AuxiliaryConfig(model="m", **settings))
        messages = [{"role": "user", "content": "q"}]
        assert await ModelServer({"m": given}, journal=journal).chat("m", 1, messages) == "an answer"
        return len(model.asked)

    assert [await asked(), await asked(), await asked(**changed), await asked(**changed)] == [1, 0, 1, 0]
    journal.close()


def test_answers_are_kept_but_for_one_that_was_cut_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "answers.jsonl"
    journal = AnswerJournal(path)
    given = {"00ff": 'with "quotes": and\nlines', "abcd": "", "0123": "é"}
    for key, text in given.items():
        journal.add(key, text)
    journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"4567": "not who')
    journal = AnswerJournal(path)
    assert {key: journal.get(key) for key in given} == given and journal.get("4567") is None
    journal.add("4567", "whole")
    assert journal.get("00ff") == given["00ff"] and journal.get("4567") == "whole"
    journal.close()
    assert [json.loads(line) for line in path.read_text().splitlines()][-1] == {"4567": "whole"}
