"""The engine's contract, on real vLLM: tokens and log-probs are the model's own, and new weights take effect."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from torch import nn

from rayrft.config.explorer import RepetitionConfig
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ModelError, RequestRefused
from rayrft.explorer.engines.client import EngineClient
from rayrft.explorer.engines.exchange import INTERRUPTED, Capacity, Chunk, Completion, Request, Sampling, Session
from rayrft.explorer.engines.pool import EnginePool, Member
from rayrft.runtime.waits import Waits
from tests.algorithms.flat import token_logprobs
from tests.errors import about
from tests.explorer.conftest import EngineUnderTest
from tests.scripted import handle, remote

PROMPT = [5, 40, 41, 42, 43, 3]


def sampling(temperature: float = 1.0, max_tokens: int = 12, stop: tuple[int, ...] = ()) -> Sampling:
    return Sampling(temperature, max_tokens, stop)


def generate(engine: EngineUnderTest, n: int = 4, prompt: list[int] = PROMPT, **options: Any) -> list[Completion]:
    return ray.get(engine.actor.generate.remote(Request(prompt, n, sampling(**options))))


@torch.no_grad()
def recomputed(model: nn.Module, completion: Completion, temperature: float, prompt: list[int] = PROMPT) -> list[float]:
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    logprobs, _ = token_logprobs(model(input_ids=ids).logits, ids, temperature=temperature)
    return logprobs[0, len(prompt) :].tolist()


def update(engine: EngineUnderTest, model: nn.Module, version: int) -> tuple[str, Any]:
    """A whole round as the weight sync does it; gives the digest sent and what the engine holds."""
    sent, held, _ = engine.update(dict(model.named_parameters()), version)
    return sent, held


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_behaviour_logprobs_are_those_of_the_distribution_that_was_sampled(
    engine: EngineUnderTest, temperature: float
) -> None:
    update(engine, engine.model(), 1)
    for completion in generate(engine, temperature=temperature):
        assert completion.logprobs == pytest.approx(recomputed(engine.model(), completion, temperature), abs=1e-4)


async def test_a_stream_brings_the_answer_in_parts_and_may_be_interrupted(engine: EngineUnderTest) -> None:
    update(engine, engine.model(), 2)
    pool = EnginePool()
    await pool.join([Member(handle(engine.actor, "engine-0"), 2)])
    client = EngineClient(remote(pool), Waits("test"))
    for enough in (100, 5):
        chunks, session = list[Chunk](), Session()

        def tell(chunk: Chunk, enough: int = enough, chunks: list[Chunk] = chunks, session: Session = session) -> None:
            chunks.append(chunk)
            if sum(len(chunk.token_ids) for chunk in chunks) >= enough:
                session.interrupt()

        seeded = replace(sampling(max_tokens=50), seed=1)  # this answer does not end by itself
        request = Request(PROMPT, 1, seeded, stream=True)
        [answer] = await client.generate(request, [session], tell)
        ids = [token for chunk in chunks for token in chunk.token_ids]
        assert len(chunks) > 1 and tuple(ids) == answer.token_ids[: len(ids)]
        assert answer.versions == ((0, len(answer.token_ids), 2),)
        assert answer.logprobs == pytest.approx(recomputed(engine.model(), answer, 1.0), abs=1e-4)
        assert len(answer.token_ids) == 50 if enough == 100 else 5 <= len(answer.token_ids) < 50


def test_an_answer_ends_with_its_stop_token_or_at_the_limit(engine: EngineUnderTest) -> None:
    eos = ChatTokenizer(engine.folder).end_id
    completions = generate(engine, n=32, max_tokens=40, temperature=1.0, stop=(eos,))
    assert {c.stop_reason for c in completions} <= {"stop", "length"}
    for completion in completions:
        if completion.stop_reason == "stop":
            assert completion.token_ids[-1] == eos and eos not in completion.token_ids[:-1]
        else:
            assert len(completion.token_ids) == 40 and eos not in completion.token_ids


def test_an_answer_follows_a_json_schema(engine: EngineUnderTest, tiny_model: Path) -> None:
    tokenizer = ChatTokenizer(str(tiny_model))
    properties = {"grade": {"type": "integer", "enum": [3, 12]}}
    schema = {"type": "object", "properties": properties, "required": ["grade"], "additionalProperties": False}
    asked = replace(sampling(max_tokens=60, stop=tokenizer.stop_ids), json_schema=json.dumps(schema))
    answers = ray.get(engine.actor.generate.remote(Request(PROMPT, 3, asked)))
    found = [json.loads(tokenizer.decode(list(each.token_ids))) for each in answers]
    assert all(each in ({"grade": 3}, {"grade": 12}) for each in found), found
    with pytest.raises(RequestRefused):
        ray.get(engine.actor.generate.remote(Request(PROMPT, 1, replace(asked, json_schema='{"type": "nothing"}'))))


def test_an_answer_that_repeats_itself_is_stopped_with_its_own_reason(engine: EngineUnderTest) -> None:
    repeats = Sampling(0.0, 40, (), repetition=RepetitionConfig(max_pattern=4, count=3))
    [stopped] = ray.get(engine.actor.generate.remote(Request(PROMPT, 1, repeats)))
    [whole] = ray.get(engine.actor.generate.remote(Request(PROMPT, 1, replace(repeats, repetition=None))))
    ids = stopped.token_ids
    assert stopped.stop_reason == "repetition" and whole.stop_reason == "length"
    assert ids == whole.token_ids[: len(ids)] and len(ids) < len(whole.token_ids)
    assert any(ids[-3 * size :] == ids[-size:] * 3 for size in range(1, 5))
    assert not any(ids[-3 * size - 1 : -1] == ids[-size - 1 : -1] * 3 for size in range(1, 5))


def test_an_interrupted_request_keeps_every_token_that_was_sampled(engine: EngineUnderTest) -> None:
    update(engine, engine.model(), 1)
    found: list[Completion] = []
    for number in range(20):
        begun = engine.actor.exchange.remote("client", {number: Request(PROMPT, 3, sampling(max_tokens=40))}, [])
        if number % 2:
            generate(engine, n=1, max_tokens=5)  # meanwhile the other answers have grown, too
        ended = ray.get(engine.actor.exchange.remote("client", {}, [], [number]))
        found += ended.get(number) or ray.get(begun)[number]
    for completion in found:
        ids = completion.token_ids
        assert completion.stop_reason in (INTERRUPTED, "stop") or len(ids) == 40
        assert completion.logprobs == pytest.approx(recomputed(engine.model(), completion, 1.0), abs=1e-4)
        assert completion.versions == ((0, len(ids), 1),)[: len(ids)]
    assert any(completion.stop_reason == INTERRUPTED and completion.token_ids for completion in found)
    [after] = generate(engine, n=1, max_tokens=5)
    assert len(after.token_ids) == 5 or after.stop_reason == "stop"


async def client_of(engine: EngineUnderTest) -> EngineClient:
    pool = EnginePool()
    await pool.join([Member(handle(engine.actor, "engine-0"), 0)])
    return EngineClient(remote(pool, "engine_pool"), Waits("test"))


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param({"prompt": [10**6]}, id="outside the vocabulary"),
        pytest.param({"prompt": [-1]}, id="negative token"),
        pytest.param({"prompt": [5] * 200}, id="too long"),
        pytest.param({"prompt": []}, id="empty"),
        pytest.param({"n": 0}, id="n 0"),
        pytest.param({"n": -1}, id="n -1"),
        pytest.param({"max_tokens": 0}, id="max_tokens 0"),
        pytest.param({"max_tokens": -3}, id="max_tokens -3"),
        pytest.param({"temperature": float("nan")}, id="temperature NaN"),
        pytest.param({"temperature": -1.0}, id="temperature -1"),
        pytest.param({"images": ("/no/such/picture.png",)}, id="image"),
    ],
)
async def test_a_request_that_cannot_be_is_refused_and_others_are_answered(
    engine: EngineUnderTest, request_: dict[str, Any]
) -> None:
    client = await client_of(engine)
    given = {"prompt": PROMPT, "n": 1, "temperature": 1.0, "max_tokens": 12, "images": (), **request_}
    asked = Sampling(given["temperature"], given["max_tokens"], ())
    # A model without images says so itself, before the picture is looked at.
    kind, field = (ModelError, "model") if given["images"] else (RequestRefused, "request")
    with pytest.raises(kind, check=about(field)):
        await client.generate(Request(given["prompt"], given["n"], asked, given["images"]))
    assert len(await client.generate(Request(PROMPT, 2, sampling()))) == 2


async def test_answer_k_of_a_request_with_a_seed_is_that_of_a_request_with_the_seed_plus_k(
    engine: EngineUnderTest,
) -> None:
    seed, client = 3, await client_of(engine)
    together = await client.generate(Request(PROMPT, 3, replace(sampling(), seed=seed)))
    apart = [(await client.generate(Request(PROMPT, 1, replace(sampling(), seed=seed + k))))[0] for k in range(3)]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in apart]
    assert len({answer.token_ids for answer in together}) == 3


def test_broadcast_weights_arrive_whole_and_the_engine_computes_with_them(engine: EngineUnderTest) -> None:
    model = engine.model(seed=7)
    sent, held = update(engine, model, 7)
    assert (held.version, held.digests) == (7, (sent,))
    for completion in generate(engine):
        assert completion.logprobs == pytest.approx(recomputed(model, completion, 1.0), abs=1e-4)
        assert completion.versions == ((0, len(completion.token_ids), 7),)
    [scores] = ray.get([engine.actor.score.remote([*PROMPT, 50, 51])])
    with torch.no_grad():
        ids = torch.tensor([[*PROMPT, 50, 51]])
        expected, _ = token_logprobs(model(input_ids=ids).logits, ids)
    assert scores == pytest.approx(expected[0, 1:].tolist(), abs=1e-4)


def test_the_output_layer_that_is_tied_to_the_embedding_is_not_left_stale(engine: EngineUnderTest) -> None:
    model = engine.model()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.7)  # type: ignore[operator]
    update(engine, model, 8)
    for completion in generate(engine):
        assert completion.logprobs == pytest.approx(recomputed(model, completion, 1.0), abs=1e-4)


def updated_in_flight(
    engine: EngineUnderTest, versions: tuple[int, int], prompt: list[int], max_tokens: int, keep_cache: bool = False
) -> tuple[list[Completion], list[Completion]]:
    """Ask for 128 answers, and give the engine other weights while some of them are sampled; return these answers and
    those to requests that came afterwards."""
    request = Request(prompt, 16, sampling(max_tokens=max_tokens))
    old, new = engine.model(), engine.model(seed=3)
    for attempt in range(20):
        update(engine, old, versions[0])
        running = [engine.actor.generate.remote(request) for _ in range(8)]
        first_token = {0: replace(request, n=1, stream=True)}  # of a request that is begun after the others
        ray.get(engine.actor.exchange.remote(f"{versions}-{keep_cache}-{attempt}", first_token, []))
        engine.update(dict(new.named_parameters()), versions[1], keep_cache=keep_cache)
        later = generate(engine, 8, prompt, max_tokens=5)
        completions = [completion for each in ray.get(running) for completion in each]
        if any(len(completion.versions) == 2 for completion in completions):
            return completions, later
    pytest.fail("no request was in flight")


def test_requests_in_flight_survive_an_update_and_say_which_weights_gave_each_token(engine: EngineUnderTest) -> None:
    completions, _ = updated_in_flight(engine, (20, 21), PROMPT, max_tokens=50)
    assert len(completions) == 128
    for completion in completions:
        length = len(completion.token_ids)
        assert length == len(completion.logprobs)
        assert length == 50 or completion.stop_reason == "stop"
        spans = completion.versions
        assert [span[0] for span in spans] == [0, *(span[1] for span in spans[:-1])], "spans leave a gap"
        assert spans[-1][1] == length
        assert [span[2] for span in spans] == sorted({span[2] for span in spans})
        assert {span[2] for span in spans} <= {20, 21}


def test_it_says_what_its_cache_holds(engine: EngineUnderTest) -> None:
    bytes_a_token = 2 * 2 * 64 * 4  # keys and values, of 2 layers, of 64 numbers in float32
    assert ray.get(engine.actor.capacity.remote()) == Capacity((64 << 20) // bytes_a_token, 256)


def test_a_kept_cache_is_used_by_the_requests_that_were_running_and_by_no_later_one(engine: EngineUnderTest) -> None:
    prompt = PROMPT * 6  # longer than a block of the cache

    def difference(completions: list[Completion]) -> float:
        """The largest one of what the new weights gave from what they give from the start."""
        return max(
            float(np.abs(np.subtract(completion.logprobs, recomputed(new, completion, 1.0, prompt))[start:end]).max())
            for completion in completions
            for start, end, version in completion.versions
            if version == 31
        )

    new, found = engine.model(seed=3), []
    for keep in (False, True):
        running, later = updated_in_flight(engine, (30, 31), prompt, max_tokens=28, keep_cache=keep)
        assert difference(later) < 1e-4
        found.append(difference(running))
    assert found[0] < 1e-4 and found[1] > 1e-3


def test_an_engine_leaves_no_semaphore_behind_that_only_it_would_remove(engine: EngineUnderTest) -> None:
    actor = psutil.Process(ray.get(engine.actor.pid.remote()))
    for process in (actor, *actor.children(recursive=True)):
        assert not [each.path for each in process.memory_maps() if each.path.startswith("/dev/shm/sem.")]


def test_a_core_ends_with_its_actor_even_if_nobody_is_left_to_end_it() -> None:
    script = """
import os, signal
from rayrft.explorer.engines.weight_plugin import end_with_parent
if not os.fork():
    end_with_parent()
    print(os.getpid(), flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as actor:
        assert actor.stdout is not None
        core = psutil.Process(int(actor.stdout.readline()))
        actor.kill()
        core.wait(timeout=60)  # raises if it is still there
