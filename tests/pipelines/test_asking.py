"""What operators ask: answered at once for many rows, the same again, and without harm where a model fails."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from aiohttp import web

from rayrft.config.auxiliary import AuxiliaryConfig
from rayrft.config.pipelines import EndpointConfig
from rayrft.data.formats import json_field
from rayrft.errors import ActorDied, ConfigError, OperatorFailed, OperatorTimeout, RequestRefused
from rayrft.pipelines import Context
from rayrft.pipelines.run.models import AnswerJournal, AskedModel, ModelServer
from rayrft.rewards.judge import Messages
from tests.errors import about
from tests.pipelines.asked import ran
from tests.pipelines.small import OWN, linked, operator, rows
from tests.scripted import ScriptedChat, chat_endpoint, says

pytestmark = pytest.mark.usefixtures("forked_templates")

GRADE = '{"reason": "", "grade": 7}'


async def hang() -> str:
    await asyncio.Event().wait()
    raise AssertionError


def judged(count: int, judge: ScriptedChat | None = None, *, least: float = 5, **more: Any) -> Any:
    """What `ran` gives where so many rows are judged."""
    batch = rows(answer=[f"answer {number}" for number in range(count)])
    return ran("judged", batch, {"judge": judge} if judge else {}, model="judge", least=least, **more)


@pytest.mark.parametrize("calls", [500, 20])
def test_as_many_rows_are_asked_at_once_as_the_model_takes(calls: int) -> None:
    together, running, most = asyncio.Barrier(calls), 0, 0

    async def reply() -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await together.wait()  # endlessly, unless so many are asked at a time
        running -= 1
        return GRADE

    model = ScriptedChat(lambda messages, seed: reply())
    found, _, _ = judged(1000, model, calls=calls, least=7)
    assert len(found) == 1000 and found[0]["grade"] == 7.0 and most == calls


@pytest.mark.parametrize("least", [29, 57, 58])
def test_the_lowest_grade_is_kept_on_any_scale(least: int) -> None:
    judge = says(f'{{"reason": "", "grade": {least}}}')
    assert len(judged(1, judge, low=0, high=100, least=least)[0]) == 1


def test_the_same_rows_are_asked_the_same_in_whatever_batches() -> None:
    seen = []
    for size in (3, 100):
        model = ScriptedChat(lambda messages, seed: f'{{"reason": "", "grade": {seed % 11}}}')
        found, _, _ = judged(20, model, batch_rows=size, votes=3, temperature=1.0)
        seen.append((found, sorted(str(each) for each in model.asked)))
    assert seen[0] == seen[1] and 0 < len(seen[0][0]) < 20


def test_a_failed_request_is_its_rows_problem() -> None:
    async def refuse() -> str:
        raise RequestRefused("the prompt has 900 tokens")

    def reply(messages: Messages, seed: int) -> Any:
        [number] = map(int, re.findall("answer ([0-9])", messages[1]["content"]))
        return refuse() if number == 1 else hang() if number == 2 else GRADE

    reasons = [f"no answer of the judge: {why}" for why in ("the prompt has 900 tokens", "no answer within 0.2 s")]
    model, settings = ScriptedChat(reply), {"answer_s": 0.2}
    found, report, gone = judged(4, model, settings=settings)
    assert [row["answer"] for row in found] == ["answer 0", "answer 3"] and [why for _, why in gone] == reasons
    found, report, gone = judged(4, model, settings=settings, without="keep")
    assert [row["grade"] for row in found] == [7.0, None, None, 7.0] and not gone
    assert report.notes == {"no answer of the judge": 2} and report.noted == reasons


def test_a_dead_engine_or_an_endpoint_that_is_not_there_fails_the_operator() -> None:
    async def die() -> str:
        raise ActorDied("the engine failed to answer", field="auxiliary-judge-0")

    with pytest.raises(OperatorFailed, check=about("operators.0.judged", "auxiliary-judge-0")) as caught:
        judged(5, ScriptedChat(lambda m, s: die()))
    assert "the engine failed to answer" in str(caught.value) and "5 rows" in str(caught.value)
    endpoint = EndpointConfig(url="http://127.0.0.1:9/v1", model="m", retries=0)
    with pytest.raises(OperatorFailed, match="Connection", check=about("operators.0.judged", "judge")):
        judged(40, settings={"endpoints": {"judge": endpoint}})


def test_a_model_that_answers_nothing_any_more_counts_as_dead_and_a_few_failures_do_not(tmp_path: Path) -> None:
    answered = 40
    model: ScriptedChat = ScriptedChat(lambda m, s: GRADE if len(model.asked) <= answered else hang())
    settings = {"answer_s": 0.05, "journal": tmp_path / "answers.jsonl"}
    with pytest.raises(OperatorFailed, match="32 requests in a row had no answer", check=about("operators.0.judged")):
        judged(100, model, calls=8, settings=settings)
    found, _, _ = judged(100, again := says(GRADE), settings=settings)
    assert len(found) == 100 and len(again.asked) == 100 - answered
    model: ScriptedChat = ScriptedChat(lambda m, s: GRADE if len(model.asked) % 10 == 0 else hang())
    _, _, gone = judged(60, model, calls=1, settings={"answer_s": 0.01})
    assert len(gone) == 54


def test_an_operator_that_asks_and_then_hangs_is_stopped() -> None:
    with pytest.raises(OperatorTimeout, check=about("operators.0.asks_and_hangs")):
        ran("asks_and_hangs", rows(answer=["a"]), {"judge": says("yes")}, deadline_s=0.5, plugins=[OWN])


async def test_an_endpoint_is_asked_again_and_what_it_does_not_answer_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WRITER_KEY", "secret")
    tries, soon = Counter[str](), {"retry-after": "0.01"}
    odd: dict[str, Callable[[], web.Response]] = {
        "busy": lambda: web.json_response({"error": {"message": "slow down"}}, status=429, headers=soon),
        "broken": lambda: web.Response(status=500, text="oh no", headers=soon),
        "html": lambda: web.Response(text="<html>welcome</html>", content_type="text/html"),
        "null": lambda: web.json_response({"choices": None}),
        "list": lambda: web.json_response({"choices": [{"message": {"content": [1, 2]}}]}),
        "long": lambda: web.json_response({"error": {"message": "too many tokens"}}, status=400),
    }

    def reply(headers: Mapping[str, str], body: dict[str, Any]) -> str | web.Response:
        assert headers["Authorization"] == "Bearer secret"
        kind = next((word for word in odd if word in body["messages"][-1]["content"]), "fine")
        tries[kind] += 1
        return GRADE if kind == "fine" or (kind == "busy" and tries[kind] == 3) else odd[kind]()

    given = rows(answer=["fine", *list(odd)[:-1], *["long"] * 40])
    async with chat_endpoint(reply) as url:
        endpoint = EndpointConfig(url=url, model="m", key_variable="WRITER_KEY", retries=2, calls=2)
        settings = {"endpoints": {"judge": endpoint}}
        found, _, gone = await asyncio.to_thread(ran, "judged", given, {}, settings=settings, model="judge", least=5)
    assert [row["answer"] for row in found] == ["fine", "busy"] and tries["busy"] == tries["broken"] == 3
    reasons = [reason.removeprefix("no answer of the judge: ") for _, reason in gone]
    assert reasons[0].startswith("status 500") and "welcome" in reasons[1]
    assert "not a chat completion" in reasons[2] and "not a chat completion" in reasons[3]
    assert len(reasons) == 44, "what is too long for it does not make it dead"
    assert all(each.startswith("status 400") and "too many tokens" in each for each in reasons[4:])


SCORED = Context(models=["a"], scores=True)


def test_what_cannot_be_asked_is_refused_before_anything_starts() -> None:
    for name, options, context, field in (
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
        ("hinted_solutions", {"hint": "mixed"}, SCORED, ".hinted_solutions"),
        ("hinted_solutions", {"domain": "mixed"}, SCORED, ".domain"),
        ("corrected_answers", {}, SCORED, ".response"),
    ):
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
