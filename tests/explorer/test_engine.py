"""The engine's contract, on real vLLM, with this process as the trainer: tokens, log-probs, and new weights."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from ray.exceptions import RayTaskError
from torch import nn

from rayrft.config.auxiliary import AuxiliaryConfig
from rayrft.config.explorer import EngineConfig, RepetitionConfig
from rayrft.config.model import TinyModelConfig
from rayrft.config.trainer import LoraConfig, TrainerConfig
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ModelError, RequestRefused
from rayrft.explorer.engines.auxiliary import AuxiliaryModel
from rayrft.explorer.engines.engine import EngineWeights, RolloutEngine
from rayrft.explorer.engines.exchange import INTERRUPTED, Capacity, Chunk, Completion, Request, Sampling, Session
from rayrft.pipelines.run.models import AskedModel
from rayrft.rewards import Reward, inline, register_reward
from rayrft.runtime.stacks import dump
from rayrft.runtime.waits import WaitReport
from rayrft.trainer.learner import Learner
from rayrft.trainer.loading import load_hf, load_policy
from rayrft.trainer.lora import Lora
from rayrft.trainer.model import named_weights, write_hf
from rayrft.trainer.policy import Policy
from rayrft.trainer.tiny import make_tiny_model
from rayrft.weights.buckets import plan_buckets
from rayrft.weights.files import VersionFolder
from rayrft.weights.messages import Link, Parcel, TensorMeta
from tests.algorithms.flat import token_logprobs
from tests.errors import about
from tests.explorer.live_engine import PROMPT, EngineUnderTest, linked, sampling
from tests.pipelines.asked import ran
from tests.pipelines.small import rows


@pytest.fixture(scope="module")
def engine(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    """One with a dense layer, a layer of experts, whose size the engine pads, and a tied head."""
    folder = tmp_path_factory.mktemp("engine")
    shape = TinyModelConfig(layers=2, hidden_size=64, heads=2, intermediate_size=48, experts=4)
    prompts = [f"Spell this word backward: {word}" for word in ("cat", "horse", "bird")]
    make_tiny_model(shape, prompts, [], folder, max_length=64, seed=0)
    # As on a machine without a C++ compiler.
    bare = {"CXX": "/no/compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor"))}
    options = {"num_cpus": 0.5, "max_concurrency": 1000, "runtime_env": {"env_vars": bare}}
    actor = ray.remote(RolloutEngine).options(**options).remote()
    up = actor.start.remote(str(folder), EngineConfig(), max_length=64, dtype="float32", seed=0, structured=True)
    reports: list[WaitReport] = []
    while not ray.wait([up], timeout=0.2)[0]:
        reports.append(ray.get(actor.waiting.remote()))
    ray.get(up)
    yield EngineUnderTest(actor, folder, linked(actor, 1), reports=[report for report in reports if report])
    ray.kill(actor)


@torch.no_grad()
def recomputed(
    model: nn.Module, completion: Completion, temperature: float = 1.0, prompt: list[int] = PROMPT
) -> list[float]:
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    logprobs, _ = token_logprobs(model(input_ids=ids).logits, ids, temperature=temperature)
    return logprobs[0, len(prompt) :].tolist()


@register_reward("has_an_a")
@inline
def has_an_a() -> Reward:
    return lambda task, response: float("a" in response)


def test_an_engine_tells_what_it_does_while_it_starts(engine: EngineUnderTest) -> None:
    phases = [report.doing.partition(" since ")[0] for report in engine.reports]
    assert [*dict.fromkeys(phases)] in (
        ["imports vLLM", "loads the model"],
        ["waits to be started", "imports vLLM", "loads the model"],
    )
    last = re.fullmatch(r"loads the model since (\d\d:\d\d:\d\d), (.*) GB in memory", engine.reports[-1].doing)
    assert last is not None and float(last[2]) > 0.5  # vLLM twice
    assert len({report.doing.split(" since ")[1][:8] for report in engine.reports[-2:]}) == 1  # of the phase
    assert all(report.quiet_s < 60 and not report.waits for report in engine.reports)


def test_an_operator_is_answered_for_hundreds_of_rows_at_once_and_the_same_again(engine: EngineUnderTest) -> None:
    config = AuxiliaryConfig(model=str(engine.folder), max_length=64, max_tokens=12)

    @asynccontextmanager
    async def engines(names: Collection[str]) -> AsyncIterator[dict[str, AskedModel]]:
        client = await engine.client()
        yield {"m": AskedModel(AuxiliaryModel("m", config, ChatTokenizer(engine.folder), client.generate))}

    def run(size: int) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
        words = ["cat", "horse", "bird"]
        batch = rows(question=[f"Spell this word backward: {words[n % 3]}" for n in range(100)], answer=["x"] * 100)
        found, _, gone = ran(
            "hinted_solutions", batch, {"m": None}, reward="has_an_a", settings={"engines": engines}, batch_rows=size,
            model="m", tries=3, max_pass_rate=1.0, least_words=1, hinted_tries=1,
        )  # fmt: skip
        return found, gone

    found, gone = run(1000)
    assert 5 < len(found) < 100 and all("a" in row["response"] for row in found)
    assert len({row["response"] for row in found}) > 3, "rows of one question have seeds of their own"
    problems = {reason for _, reason in gone} - {"replaced by a derived row"}
    assert any("leaves no room for an answer" in each for each in problems), "the hint makes it too long"
    assert all(each.startswith("no answer: ") for each in problems)
    assert run(30) == (found, gone)


async def test_a_stream_brings_the_answer_in_parts_and_may_be_interrupted(engine: EngineUnderTest) -> None:
    model, client = engine.model(), await engine.client()
    engine.update(model.named_parameters(), 2)
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
        assert answer.logprobs == pytest.approx(recomputed(model, answer), abs=1e-4)
        assert len(answer.token_ids) == 50 if enough == 100 else 5 <= len(answer.token_ids) < 50


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_scored_and_every_token_has_the_most_probable_ones(
    engine: EngineUnderTest, stream: bool
) -> None:
    model, client = engine.model(), await engine.client()
    engine.update(model.named_parameters(), 2)
    prompt, streamed = [*PROMPT * 8, 50, 51], 0
    asked = Request(prompt, 1 if stream else 2, sampling(max_tokens=6), stream=stream, alternatives=3, scored=True)
    for _ in range(2):  # a cached prompt is scored, too
        chunks = list[Chunk]()
        answers = await client.generate(asked, [], chunks.append if stream else None)
        told = tuple(each for chunk in chunks for each in chunk.alternatives)
        assert told == answers[0].alternatives[: len(told)]
        streamed += len(told)
    assert bool(streamed) == stream
    for answer in answers:
        assert answer.prompt is not None and answer.prompt.token_ids == (*prompt[1:],)
        ids = [*prompt, *answer.token_ids]
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        best = [*answer.prompt.alternatives, *answer.alternatives]
        assert len(best) == len(ids) - 1
        for at, (token, logprob) in enumerate(zip(ids[1:], [*answer.prompt.logprobs, *answer.logprobs], strict=True)):
            assert logprob == pytest.approx(float(expected[at, token]), abs=1e-4)
            assert [value for _, value in best[at]] == pytest.approx(expected[at].topk(3).values.tolist(), abs=1e-4)
            assert [float(expected[at, other]) for other, _ in best[at]] == pytest.approx(
                [value for _, value in best[at]], abs=1e-4
            )


def test_an_answer_ends_with_its_stop_token_or_at_the_limit(engine: EngineUnderTest) -> None:
    eos = ChatTokenizer(engine.folder).end_id
    completions = engine.generate(n=32, max_tokens=40, stop=(eos,))
    assert {c.stop_reason for c in completions} <= {"stop", "length"}
    for completion in completions:
        if completion.stop_reason == "stop":
            assert completion.token_ids[-1] == eos and eos not in completion.token_ids[:-1]
        else:
            assert len(completion.token_ids) == 40 and eos not in completion.token_ids


def test_an_answer_has_the_tokens_that_its_sampling_allows(engine: EngineUnderTest) -> None:
    tokenizer, asked = ChatTokenizer(engine.folder), sampling(max_tokens=6)
    eos, few = tokenizer.end_id, tuple(PROMPT[1:4])
    word = tokenizer.decode([few[0]])

    def sampled(**changes: Any) -> set[int]:
        answers = ray.get(engine.actor.generate.remote(Request(PROMPT, 8, replace(asked, **changes))))
        assert all(len(answer.token_ids) == 6 for answer in answers)
        return {token for answer in answers for token in answer.token_ids}

    ends = {"stop_token_ids": (eos,), "allowed_token_ids": (*few, eos)}
    assert sampled(**ends, min_tokens=6) <= {*few}
    assert sampled(ignore_eos=True, allowed_token_ids=(*few, eos)) <= {*few, eos}
    assert few[0] not in sampled(min_tokens=6, allowed_token_ids=few, bad_words=(word,))


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
    model = engine.model()
    engine.update(model.named_parameters(), 1)
    found: list[Completion] = []
    for number in range(20):
        begun = engine.actor.exchange.remote("client", {number: Request(PROMPT, 3, sampling(max_tokens=40))}, [])
        if number % 2:
            engine.generate(n=1, max_tokens=5)  # meanwhile the other answers have grown, too
        ended = ray.get(engine.actor.exchange.remote("client", {}, [], [number]))
        found += ended.get(number) or ray.get(begun)[number]
    for completion in found:
        ids = completion.token_ids
        assert completion.stop_reason in (INTERRUPTED, "stop") or len(ids) == 40
        assert completion.logprobs == pytest.approx(recomputed(model, completion), abs=1e-4)
        assert completion.versions == ((0, len(ids), 1),)[: len(ids)]
    assert any(completion.stop_reason == INTERRUPTED and completion.token_ids for completion in found)
    [after] = engine.generate(n=1, max_tokens=5)
    assert len(after.token_ids) == 5 or after.stop_reason == "stop"


WRONG: dict[str, list[Any]] = {
    "prompt": [[10**6], [-1], [5] * 200, []],
    "n": [0, -1],
    "max_tokens": [0, -3],
    "temperature": [float("nan"), -1.0],
    "images": [("/no/such/picture.png",)],
}


@pytest.mark.parametrize("part", WRONG)
async def test_a_request_that_cannot_be_is_refused_and_others_are_answered(engine: EngineUnderTest, part: str) -> None:
    client = await engine.client()
    # A model without images says so itself, before the picture is looked at.
    kind, field = (ModelError, "model") if part == "images" else (RequestRefused, "request")
    for value in WRONG[part]:
        given = {"prompt": PROMPT, "n": 1, "temperature": 1.0, "max_tokens": 12, "images": (), part: value}
        asked = Sampling(given["temperature"], given["max_tokens"], ())
        with pytest.raises(kind, check=about(field)):
            await client.generate(Request(given["prompt"], given["n"], asked, given["images"]))
        assert len(await client.generate(Request(PROMPT, 2, sampling()))) == 2


async def test_answer_k_of_a_request_with_a_seed_is_that_of_a_request_with_seed_plus_k(engine: EngineUnderTest) -> None:
    seed, client = 3, await engine.client()
    together = await client.generate(Request(PROMPT, 3, replace(sampling(), seed=seed)))
    apart = [(await client.generate(Request(PROMPT, 1, replace(sampling(), seed=seed + k))))[0] for k in range(3)]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in apart]
    assert len({answer.token_ids for answer in together}) == 3


def test_the_engine_computes_with_broadcast_weights_and_gives_their_log_probs(engine: EngineUnderTest) -> None:
    model = engine.model(seed=7)  # its head is tied to the embedding
    engine.update(model.named_parameters(), 7)
    for temperature in (1.0, 0.7):
        for completion in engine.generate(temperature=temperature):
            assert completion.logprobs == pytest.approx(recomputed(model, completion, temperature), abs=1e-4)
            assert completion.versions == ((0, len(completion.token_ids), 7),)
    [scores] = ray.get([engine.actor.score.remote([*PROMPT, 50, 51])])
    with torch.no_grad():
        ids = torch.tensor([[*PROMPT, 50, 51]])
        expected, _ = token_logprobs(model(input_ids=ids).logits, ids)
    assert scores == pytest.approx(expected[0, 1:].tolist(), abs=1e-4)


@pytest.mark.parametrize("buckets", [0, 3])
def test_an_update_that_breaks_off_leaves_the_engine_paused_and_the_next_one_is_whole(
    engine: EngineUnderTest, buckets: int
) -> None:
    old, new = engine.model(), engine.model(seed=9)
    engine.update(old.named_parameters(), 40)
    tensors = dict(new.named_parameters())
    parcel = Parcel([TensorMeta.of(name, tensor, torch.float32) for name, tensor in tensors.items()], 16 << 10)
    ray.get(engine.actor.pause.remote(False))
    engine.transfers += 1
    receiving = engine.actor.receive.remote(engine.transfers, 41)
    sent = sum(map(len, plan_buckets(parcel.metas, parcel.bucket_bytes)[:buckets]))
    with pytest.raises(ValueError, match="shorter"):
        engine.channel.send(engine.transfers, parcel, (tensors[meta.name].detach() for meta in parcel.metas[:sent]))
    engine.channel.close()  # as when the first rank has lost another engine
    with pytest.raises(RayTaskError):
        ray.get(receiving)
    waiting = engine.actor.generate.remote(Request(PROMPT, 4, sampling()))
    engine.channel = linked(engine.actor, 2 + buckets)
    engine.update(new.named_parameters(), 41)
    for completion in [*ray.get(waiting), *engine.generate()]:
        assert completion.versions == ((0, len(completion.token_ids), 41),), "no token has weights of two versions"
        assert completion.logprobs == pytest.approx(recomputed(new, completion), abs=1e-4)


def test_it_computes_with_weights_that_come_as_files_in_full_and_as_differences(
    engine: EngineUnderTest, tmp_path: Path
) -> None:
    engine.channel = linked(engine.actor, 20, "files", address=str(tmp_path), full_every=10)
    model = engine.model(seed=11)
    for version in (50, 51, 52):
        engine.update(model.named_parameters(), version)
        for completion in engine.generate():
            assert completion.versions == ((0, len(completion.token_ids), version),)
            assert completion.logprobs == pytest.approx(recomputed(model, completion), abs=1e-4)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.view(-1)[::50] += 0.3  # enough to be seen
    written = [sum(file.stat().st_size for file in each.glob("*.bin")) for each in sorted(tmp_path.iterdir())]
    assert len(written) == 3 and max(written[1:]) < 0.1 * written[0]

    # As an engine elsewhere, which meets no trainer and knows the numbers of versions alone.
    options = {"address": str(tmp_path)}
    link = Link("files", "", 0, 0, senders=0, receivers=1, timeout_s=0, secret="", options=options)
    ray.get([engine.actor.connect.remote(link, 0), engine.actor.pause.remote(False)])
    with pytest.raises(RayTaskError, match="is missing"):
        ray.get(engine.actor.receive.remote(4, 53))
    held = ray.get(engine.actor.receive.remote(3, 54))
    folder = VersionFolder(str(tmp_path))
    assert held == EngineWeights(54, (folder.manifest(folder.ref(3)).digest,))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[::50] -= 0.3  # as it was sent
    for completion in engine.generate():
        assert completion.logprobs == pytest.approx(recomputed(model, completion), abs=1e-4)
    engine.channel = linked(engine.actor, 21)


def test_it_says_what_its_cache_holds(engine: EngineUnderTest) -> None:
    bytes_a_token = 2 * 2 * 64 * 4  # keys and values, of 2 layers, of 64 numbers in float32
    assert ray.get(engine.actor.capacity.remote()) == Capacity((64 << 20) // bytes_a_token, 256)


def updated_in_flight(
    engine: EngineUnderTest, old: nn.Module, new: nn.Module, prompt: list[int], keep_cache: bool
) -> tuple[list[Completion], list[Completion]]:
    """Change the weights while some of 128 answers are sampled; return these, and answers to later requests."""
    request = Request(prompt, 16, sampling(max_tokens=28))
    for attempt in range(20):
        engine.update(old.named_parameters(), 30)
        running = [engine.actor.generate.remote(request) for _ in range(8)]
        first_token = {0: replace(request, n=1, stream=True)}  # of a request that is begun after the others
        streamed: list[Any] = [
            *ray.get(engine.actor.exchange.remote(name := f"{keep_cache}-{attempt}", first_token, [])).values()
        ]
        engine.update(new.named_parameters(), 31, keep_cache=keep_cache)
        while not isinstance(streamed[-1], list):
            streamed += ray.get(engine.actor.exchange.remote(name, {}, [])).values()
        [answer], told = streamed.pop(), [version for chunk in streamed for version in chunk.versions]
        held = [version for start, end, version in answer.versions for _ in range(start, end)]
        assert told == held[: len(told)], "a stream says which weights gave each token, as the answer does"
        later = engine.generate(8, prompt, max_tokens=5)
        completions = [completion for each in ray.get(running) for completion in each]
        if any(len(completion.versions) == 2 for completion in completions):
            return completions, later
    pytest.fail("no request was in flight")


def test_requests_in_flight_survive_an_update_and_alone_use_a_cache_that_is_kept(engine: EngineUnderTest) -> None:
    prompt = PROMPT * 6  # longer than a block of the cache
    old, new = engine.model(), engine.model(seed=3)

    def difference(completions: list[Completion]) -> float:
        """The largest one of what the new weights gave from what they give from the start."""
        return max(
            float(np.abs(np.subtract(completion.logprobs, recomputed(new, completion, 1.0, prompt))[start:end]).max())
            for completion in completions
            for start, end, version in completion.versions
            if version == 31
        )

    found = []
    for keep in (False, True):
        running, later = updated_in_flight(engine, old, new, prompt, keep)
        assert difference(later) < 1e-4
        found.append(difference(running))
        assert len(running) == 128
        for completion in running:
            length, spans = len(completion.token_ids), completion.versions
            assert length == len(completion.logprobs) and (length == 28 or completion.stop_reason == "stop")
            assert [span[0] for span in spans] == [0, *(span[1] for span in spans[:-1])], "spans leave a gap"
            assert spans[-1][1] == length and [span[2] for span in spans] in ([30], [31], [30, 31])
    assert found[0] < 1e-4 and found[1] > 1e-3


def test_an_idle_engine_has_no_thread_to_show_and_no_semaphore_that_only_it_would_remove(
    engine: EngineUnderTest,
) -> None:
    actor = psutil.Process(ray.get(engine.actor.pid.remote()))
    assert dump(actor.pid) == ""
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


# Of a policy with an adapter

ROWS = [[5, 40, 41, 42, 43, 3, 50, 51, 12], [5, 60, 3, 44]]


def moved(policy: Policy, seed: int) -> Policy:
    """The policy with an adapter that changes what it says."""
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, factor in named_weights(policy):
            factor.add_(torch.randn(factor.shape, generator=chance) * 0.3)
    return policy


def scored(policy: Policy) -> list[list[float]]:
    config = TrainerConfig(micro_batch_tokens=64)
    return Learner(policy, config, temperature=1.0, device=torch.device("cpu")).score(ROWS)


def adapted(engine: EngineUnderTest, policy: Policy, version: int) -> int:
    """Send the adapter, after which the engine must say what the policy says; gives the bytes that were sent."""
    assert policy.lora is not None
    nbytes = engine.update(named_weights(policy), version, policy.lora.adapter)
    for ours, theirs in zip(scored(policy), ray.get([engine.actor.score.remote(row) for row in ROWS]), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    return nbytes


def adapting(engine: EngineUnderTest, **settings: Any) -> Policy:
    policy = load_policy(str(engine.folder))
    config = LoraConfig(rank=2, alpha=3, targets=["q_proj", "k_proj", "v_proj", "o_proj"], **settings)
    policy.lora = Lora(policy.model, config, origin=str(engine.folder), compute=torch.float32, seed=0)
    return policy


@pytest.fixture
def policy(engine: EngineUnderTest) -> Policy:
    return adapting(engine)


def test_only_the_adapter_is_sent_and_the_engine_computes_with_all(engine: EngineUnderTest, policy: Policy) -> None:
    before = scored(policy)[0]
    # Twice: the second adapter is added to the model's own weights, not to those with the first in them.
    for version in (40, 41):
        nbytes = adapted(engine, moved(policy, seed=version), version)
    assert np.abs(np.subtract(before, scored(policy)[0])).max() > 0.1, "the adapter has no effect"
    assert nbytes == 4 * sum(p.numel() for p in policy.parameters() if p.requires_grad)
    assert nbytes < 0.1 * 4 * sum(p.numel() for p in policy.parameters())


def test_an_engine_rounds_the_weights_that_the_trainer_holds_in_4_bits(engine: EngineUnderTest, policy: Policy) -> None:
    rounded = adapting(engine, frozen="nf4")
    assert np.abs(np.subtract(scored(policy)[0], scored(rounded)[0])).max() > 0.01, "rounding has no effect"
    adapted(engine, moved(rounded, seed=3), 42)


def test_an_adapter_is_added_to_an_earlier_stage(engine: EngineUnderTest, policy: Policy, tmp_path: Any) -> None:
    stage = tmp_path / "stage"
    write_hf(moved(policy, seed=1), policy.state_dict(), ChatTokenizer(engine.folder), stage, torch.float32)
    load_hf(policy, str(stage))
    adapted(engine, policy, 50)
    adapted(engine, moved(policy, seed=2), 51)
    again = moved(adapting(engine), seed=3)
    write_hf(again, again.state_dict(), ChatTokenizer(engine.folder), stage, torch.float32)  # the stage was repeated
    load_hf(policy, str(stage))
    adapted(engine, policy, 52)
