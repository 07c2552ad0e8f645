"""The engine's contract, on real vLLM: tokens and log-probs are the model's own, and new weights take effect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import psutil
import pytest
import ray
import torch
from torch import nn

from rayrft.algorithms import token_logprobs
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import RequestRefused
from rayrft.explorer.engine import Completion, Sampling
from rayrft.explorer.router import Router
from tests.errors import about
from tests.explorer.conftest import BUCKET, EngineUnderTest
from tests.scripted import handle

PROMPT = [5, 40, 41, 42, 43, 3]


def sampling(temperature: float = 1.0, max_tokens: int = 12, stop: tuple[int, ...] = ()) -> Sampling:
    return Sampling(temperature, max_tokens, stop)


def generate(engine: EngineUnderTest, n: int = 4, **options: Any) -> list[Completion]:
    return ray.get(engine.actor.generate.remote(PROMPT, n, sampling(**options)))


@torch.no_grad()
def recomputed(model: nn.Module, completion: Completion, temperature: float) -> list[float]:
    ids = torch.tensor([[*PROMPT, *completion.token_ids]])
    logprobs, _ = token_logprobs(model(input_ids=ids).logits, ids, temperature=temperature)
    return logprobs[0, len(PROMPT) :].tolist()


def update(engine: EngineUnderTest, model: nn.Module, version: int) -> tuple[str, Any]:
    """A whole round as the weight sync does it; gives the digest sent and what the engine holds."""
    ray.get(engine.actor.pause.remote())
    tensors = dict(model.named_parameters())
    receiving = engine.actor.receive.remote(engine.parcel(tensors), BUCKET, version, None)
    sent = engine.send(tensors)
    held = ray.get(receiving)
    ray.get(engine.actor.resume.remote())
    return sent, held


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_behaviour_logprobs_are_those_of_the_distribution_that_was_sampled(
    engine: EngineUnderTest, temperature: float
) -> None:
    update(engine, engine.model(), 1)
    for completion in generate(engine, temperature=temperature):
        assert completion.logprobs == pytest.approx(recomputed(engine.model(), completion, temperature), abs=1e-4)


def test_an_answer_ends_with_its_stop_token_or_at_the_limit(engine: EngineUnderTest) -> None:
    eos = ChatTokenizer(engine.folder).eos_id
    completions = generate(engine, n=32, max_tokens=40, temperature=1.0, stop=(eos,))
    assert {c.stop_reason for c in completions} <= {"stop", "length"}
    for completion in completions:
        if completion.stop_reason == "stop":
            assert completion.token_ids[-1] == eos and eos not in completion.token_ids[:-1]
        else:
            assert len(completion.token_ids) == 40 and eos not in completion.token_ids


@pytest.mark.parametrize(
    ("prompt", "n"), [([10**6], 1), ([-1], 1), (PROMPT, 0), ([5] * 200, 1), ([], 1)], ids=lambda each: str(each)[:12]
)
async def test_a_request_that_cannot_be_is_refused_and_others_are_answered(
    engine: EngineUnderTest, prompt: list[int], n: int
) -> None:
    router = Router([handle(engine.actor)])
    with pytest.raises(RequestRefused, check=about("request")):
        await router.generate(prompt, n, sampling())
    assert len(await router.generate(PROMPT, 2, sampling())) == 2


async def test_answer_k_of_a_request_with_a_seed_is_that_of_a_request_with_the_seed_plus_k(
    engine: EngineUnderTest,
) -> None:
    seed, router = 3, Router([handle(engine.actor)])
    together = await router.generate(PROMPT, 3, replace(sampling(), seed=seed))
    apart = [(await router.generate(PROMPT, 1, replace(sampling(), seed=seed + k)))[0] for k in range(3)]
    assert [each.token_ids for each in together] == [each.token_ids for each in apart]
    assert len({each.token_ids for each in together}) == 3


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


def test_requests_in_flight_survive_an_update_and_say_which_weights_gave_each_token(engine: EngineUnderTest) -> None:
    update(engine, engine.model(), 20)
    running = [engine.actor.generate.remote(PROMPT, 16, sampling(max_tokens=50)) for _ in range(8)]
    update(engine, engine.model(seed=3), 21)
    completions = [completion for each in ray.get(running) for completion in each]
    assert len(completions) == 128
    assert any(len(completion.versions) == 2 for completion in completions), "no request was in flight"
    for completion in completions:
        length = len(completion.token_ids)
        assert length == len(completion.logprobs)
        assert length == 50 or completion.stop_reason == "stop"
        spans = completion.versions
        assert [span[0] for span in spans] == [0, *(span[1] for span in spans[:-1])], "spans leave a gap"
        assert spans[-1][1] == length
        assert [span[2] for span in spans] == sorted({span[2] for span in spans})
        assert {span[2] for span in spans} <= {20, 21}


def test_a_different_byte_gives_a_different_digest(engine: EngineUnderTest) -> None:
    model = engine.model()
    first, _ = update(engine, model, 30)
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1e-3
    second, held = update(engine, model, 31)
    assert held.digests == (second,) != (first,)


def test_an_engine_leaves_no_semaphore_behind_that_only_it_would_remove(engine: EngineUnderTest) -> None:
    actor = psutil.Process(ray.get(engine.actor.pid.remote()))
    for process in (actor, *actor.children(recursive=True)):
        assert not [each.path for each in process.memory_maps() if each.path.startswith("/dev/shm/sem.")]
