"""A real engine, asked by an operator from its process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

from rayrft.config.auxiliary import AuxiliaryConfig
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.explorer.engines.auxiliary import AuxiliaryModel
from rayrft.explorer.engines.client import EngineClient
from rayrft.explorer.engines.pool import EnginePool, Member
from rayrft.pipelines.run.models import AskedModel
from rayrft.rewards import Reward, inline, register_reward
from rayrft.runtime.waits import Waits
from tests.explorer.conftest import EngineUnderTest
from tests.pipelines.asked import ran
from tests.pipelines.small import rows
from tests.scripted import handle, remote


@register_reward("has_an_a")
@inline
def has_an_a() -> Reward:
    return lambda task, response: float("a" in response)


def test_an_engine_answers_hundreds_of_rows_at_once_and_the_same_again(engine: EngineUnderTest) -> None:
    config = AuxiliaryConfig(model=str(engine.folder), max_length=64, max_tokens=12)

    @asynccontextmanager
    async def engines(names: Collection[str]) -> AsyncIterator[dict[str, AskedModel]]:
        pool, tokenizer = EnginePool(), ChatTokenizer(engine.folder)
        await pool.join([Member(handle(engine.actor, "engine"), 0)])
        client = EngineClient(remote(pool), Waits("test"))
        yield {"m": AskedModel(AuxiliaryModel("m", config, tokenizer, client.generate))}

    def run(size: int) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
        words = ["cat", "horse", "bird"]
        batch = rows(question=[f"Spell this word backward: {words[n % 3]}" for n in range(100)], answer=["x"] * 100)
        options = {
            "batch_rows": size,
            "model": "m",
            "tries": 3,
            "max_pass_rate": 1.0,
            "least_words": 1,
            "hinted_tries": 1,
        }
        settings = {"engines": engines}
        found, _, gone = ran("hinted_solutions", batch, {"m": None}, reward="has_an_a", settings=settings, **options)
        return found, gone

    found, gone = run(1000)
    assert 5 < len(found) < 100 and all("a" in row["response"] for row in found)
    assert len({row["response"] for row in found}) > 3, "rows of one question have seeds of their own"
    problems = {reason for _, reason in gone} - {"replaced by a derived row"}
    assert any("leaves no room for an answer" in each for each in problems), "the hint makes it too long"
    assert all(each.startswith("no answer: ") for each in problems)
    assert run(30) == (found, gone)
