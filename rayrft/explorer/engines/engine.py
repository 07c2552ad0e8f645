"""RolloutEngine: one vLLM engine in an actor. Token ids (and images) go in, token ids come out.

Log-probs are those of the distribution that was sampled from (after temperature), and every token carries the version
of the weights it was sampled under. While weights change the engine is paused with its requests kept; they continue
under the new weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rayrft.config.explorer import EngineConfig
from rayrft.data.images import ImageReader, takes_images
from rayrft.errors import ActorDied, ConfigError, ModelError, RequestRefused, first_line
from rayrft.explorer.engines.arguments import engine_arguments
from rayrft.explorer.engines.core_output import printed_bytes, start_failure
from rayrft.explorer.engines.exchange import Answering, Capacity, Chunk, Completion, Request, Sampling, Stream
from rayrft.runtime.handle import Watched, once
from rayrft.runtime.loading import LoadProgress
from rayrft.runtime.ray_api import ray
from rayrft.runtime.waits import WaitReport
from rayrft.weights.messages import Link

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.logprobs import Logprob
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    Scores = Sequence[dict[int, Logprob] | None] | None

_PENALTIES = "presence_penalty", "frequency_penalty", "repetition_penalty"
_SAME = "temperature", "top_p", "top_k", "min_p", *_PENALTIES, "max_tokens", "min_tokens", "ignore_eos", "seed"
"""What vLLM's `SamplingParams` call as `Sampling` does."""
_MEMORY = ("weights", "kv_cache")
"""vLLM's tags of the GPU memory that an engine frees while it sleeps, in the order in which it wakes up. CUDA graphs
and work space wake up with the first."""


@dataclass(frozen=True)
class EngineWeights:
    """An engine's weights: the version it labels tokens with, and one digest per worker."""

    version: int
    digests: tuple[str, ...]


class RolloutEngine(Answering, Watched):
    """The actor. ``start`` starts vLLM and must be called first."""

    def __init__(self) -> None:
        super().__init__()
        self._core_ended = asyncio.Event()
        self._answers = False
        """Whether vLLM's core answers at once: not while it loads, receives weights or sleeps."""
        self._loading: LoadProgress | None = LoadProgress("waits to be started")
        """Progress of the start, until the engine has started."""
        self._names: dict[int, str] = {}
        """vLLM's names of the requests that are running, by identity."""
        self._kept = 0
        """Pauses in which the cache was kept: requests that have another number of them share no prefix."""
        self._version = 0
        self._asleep: list[str] = []
        """Which GPU memory, by vLLM's tags, is freed for the trainer."""
        self._pausing = asyncio.Lock()  # a resume must not overtake a pause that is not complete

    @once
    async def start(
        self,
        model: str,
        config: EngineConfig,
        *,
        max_length: int,
        dtype: str,
        seed: int,
        structured: bool = False,
        lent: tuple[str, ...] = (),
    ) -> None:
        """Load the model from a Hugging Face folder or hub id; return when the engine can answer, or sleeps until it
        gets weights if ``config.sleep`` is set. ``structured``: its answers may be asked to follow a JSON schema.
        ``lent``: its GPUs, where trainer ranks have them in Ray's books."""
        prepare_environment(config)
        if lent:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(lent)
        sees = takes_images(model)
        self._images = await asyncio.to_thread(ImageReader, model) if sees else None
        arguments = engine_arguments(
            model, config, max_length=max_length, dtype=dtype, seed=seed, sees=sees, structured=structured
        )
        before = printed_bytes()
        try:
            # In a thread, so that the actor answers meanwhile. The core ends with its thread, which the loop keeps.
            self._engine = await asyncio.to_thread(self._create, arguments)
        except (ValueError, TypeError) as error:
            if not config.options:
                raise
            remedy = "correct them, or remove them"
            raise ConfigError(first_line(error), remedy, field="engine.options", value=config.options) from None
        except RuntimeError as error:
            raise start_failure(_own_name(), before) if "initialization failed" in str(error) else error from None
        await self._engine.update_weight_version("0")
        self._answers, self._loading = True, None
        self._watch_core()
        if config.sleep:
            await self.sleep()
        gc.collect()
        gc.freeze()  # vLLM's core does the same: what lives as long as the actor is not traversed again and again

    async def generate(self, request: Request, stream: Stream | None = None) -> list[Completion]:
        """Sample the answers to a request; with a ``stream`` the one answer, whose tokens are added to it.

        Raises RequestRefused if vLLM rejects it, and ActorDied if its core has died.
        """
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, StructuredOutputsParams
        from vllm.v1.engine.exceptions import EngineDeadError

        vocabulary = self._engine.model_config.get_vocab_size()
        if not all(0 <= token < vocabulary for token in request.prompt):  # vLLM checks too late and its core dies
            raise _refused("the prompt has token ids outside the vocabulary", vocabulary)
        sampling, repetition = request.sampling, request.sampling.repetition
        try:
            params = SamplingParams(
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY if stream is None else RequestOutputKind.DELTA,
                n=request.n,
                **{name: getattr(sampling, name) for name in _SAME},
                logit_bias=dict(sampling.logit_bias) or None,
                stop_token_ids=list(sampling.stop_token_ids),
                bad_words=list(sampling.bad_words),
                allowed_token_ids=list(sampling.allowed_token_ids) or None,
                logprobs=request.alternatives,
                prompt_logprobs=request.alternatives if request.scored else None,
                repetition_detection=repetition
                and RepetitionDetectionParams(
                    max_pattern_size=repetition.max_pattern,
                    min_pattern_size=repetition.min_pattern,
                    min_count=repetition.count,
                ),
                structured_outputs=StructuredOutputsParams(json=sampling.json_schema) if sampling.json_schema else None,
            )
            name = self._names[id(request)] = uuid.uuid4().hex
            output = await self._run(request.prompt, request.images, params, name, stream)
        except (VLLMClientError, ValueError, TypeError) as error:
            raise _refused(first_line(error), len(request.prompt)) from None
        except EngineDeadError:
            raise _core_ended() from None
        finally:
            self._names.pop(id(request), None)
        prompt, count = None, request.alternatives
        if request.scored:
            prompt = _scored(request.prompt[1:], (output.prompt_logprobs or [])[1:], count)
        completions = []
        for answer in output.outputs:
            tokens = Chunk.joined(stream.chunks) if stream else _scored(answer.token_ids, answer.logprobs, count)
            spans = tuple((span.start, span.end, int(span.version)) for span in answer.weight_versions or ())
            reason = answer.finish_reason or "unknown"
            completions.append(
                Completion(tokens.token_ids, tokens.logprobs, spans, reason, tokens.alternatives, prompt)
            )
        return completions

    async def capacity(self) -> Capacity:
        cache = self._engine.vllm_config.cache_config
        answers = self._engine.vllm_config.scheduler_config.max_num_seqs
        return Capacity((cache.num_gpu_blocks or 0) * cache.block_size, answers)

    async def interrupt(self, request: Request) -> None:
        if name := self._names.get(id(request)):
            await self._engine.abort(name)  # vLLM then returns what was sampled, with stop reason `INTERRUPTED`

    async def score(self, token_ids: list[int], images: tuple[str, ...] = ()) -> list[float]:
        """Return the log-prob at temperature 1 of every token but the first, given its prefix."""
        [answer] = await self.generate(Request(token_ids, 1, Sampling(0.0, 1, ()), images, scored=True))
        assert answer.prompt is not None  # it was asked for
        return list(answer.prompt.logprobs)

    async def connect(self, link: Link, first: int) -> None:
        """Connect to the trainer's ranks; ``first`` is the index of this engine's first worker among the receivers."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        info = {"link": vars(link), "first": first}
        with self._occupied():
            await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def pause(self, keep_cache: bool = False) -> None:
        """Stop decoding and keep running requests, and with ``keep_cache`` their KV cache, which requests that come
        later do not use; else it is recomputed after the pause. Raises ModelError if it cannot be kept."""
        if keep_cache and self._images is not None:
            problem = "vLLM keeps what the old weights saw in an image for new requests, too"
            remedy = "use recompute with models that take images"
            raise ModelError(problem, remedy, field="weight_sync.kv_cache", value="keep")
        async with self._pausing:
            await self._engine.pause_generation(mode="keep", clear_cache=not keep_cache)
            self._kept += keep_cache  # not before: what the old weights still compute must not look like the new ones'

    async def receive(self, number: int, version: int) -> EngineWeights:
        """Receive transfer ``number`` of the link while paused, and label it ``version``; then resume. An engine that
        sleeps wakes up: the memory of its weights before the transfer, that of its KV cache after it.

        Returns the version and digests received. If it fails, the engine may have weights of two versions: it stays
        paused until it has received another transfer.
        """
        await self._wake("weights")
        with self._occupied():
            digests = await self._engine.collective_rpc("receive_weights", args=(number,))
        await self.wake_up()
        await self._engine.update_weight_version(str(version))
        self._version = int(await self._engine.get_weight_version())
        weights = EngineWeights(self._version, tuple(digests))
        await self.resume()
        return weights

    async def resume(self) -> None:
        """Continue decoding after a `pause` that no `receive` followed."""
        async with self._pausing:
            await self._engine.resume_generation()

    async def sleep(self) -> None:
        """Free the GPU memory of weights and cache for the trainer."""
        with self._occupied():
            await self._engine.sleep(level=1)
        self._asleep = list(_MEMORY)

    async def wake_up(self) -> None:
        """Allocate the GPU memory again that `sleep` has freed."""
        await self._wake(*_MEMORY)

    async def waiting(self) -> WaitReport | None:
        """Return the progress of the start; later answer once vLLM's core has answered: a core that hangs shows as an
        actor that is silent."""
        if (loading := self._loading) is not None:
            return WaitReport([], await asyncio.to_thread(loading.measure), loading.doing)
        if self._answers:
            await self.respond()
        return None

    async def respond(self) -> int:
        """Return the version of the weights, once vLLM's core answers."""
        return int(await self._engine.get_weight_version())

    async def watch(self) -> None:
        """Never return: a caller that awaits it learns at once when this actor dies.

        Raises ActorDied when the engine's core process has ended: requests fail then, but other calls, such as
        `pause`, would hang.
        """
        await self._core_ended.wait()
        raise _core_ended()

    async def _wake(self, *memory: str) -> None:
        for tag in memory:
            if tag in self._asleep:
                with self._occupied():
                    await self._engine.wake_up([tag])
                self._asleep.remove(tag)

    def _create(self, arguments: dict[str, Any]) -> AsyncLLM:
        assert self._loading is not None
        self._loading.enter("imports vLLM")
        gc.disable()  # else a fifth of the time of the imports
        try:
            from vllm.config.weight_transfer import WeightTransferConfig
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM

            from rayrft.explorer.engines.weight_plugin import BACKEND, WorkerExtension
        finally:
            gc.enable()
        self._loading.enter("loads the model")
        args = AsyncEngineArgs(
            worker_extension_cls=f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}",
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
            **arguments,
        )
        # The defaults of vLLM's LLM class: on GPUs its throughput is the highest.
        return AsyncLLM.from_engine_args(args, usage_context=UsageContext.LLM_CLASS)

    @contextlib.contextmanager
    def _occupied(self) -> Iterator[None]:
        """Do not ask the core for a sign of progress meanwhile: the caller has a deadline."""
        self._answers = False
        try:
            yield
        finally:
            self._answers = True

    def _watch_core(self) -> None:
        loop = asyncio.get_running_loop()

        def ended(sentinel: int) -> None:
            loop.remove_reader(sentinel)
            self._core_ended.set()

        for process in self._engine.engine_core.resources.engine_manager.processes:
            loop.add_reader(process.sentinel, ended, process.sentinel)

    async def _run(
        self,
        token_ids: list[int],
        images: tuple[str, ...],
        params: SamplingParams,
        name: str,
        stream: Stream | None = None,
    ) -> RequestOutput:
        prompt = await asyncio.to_thread(self._with_images, token_ids, images) if images else dict[str, Any]()
        prompt.setdefault("prompt_token_ids", token_ids)
        if self._kept:
            prompt["cache_salt"] = str(self._kept)
        last, scores = None, None
        async for output in self._engine.generate(prompt, params, name):
            last, scores = output, scores or output.prompt_logprobs
            if stream:
                sampled = output.outputs[0]
                chunk = _scored(sampled.token_ids, sampled.logprobs, params.logprobs or 0)
                stream.add(replace(chunk, versions=(self._version,) * len(chunk.token_ids)))
        assert last is not None  # a request that does not finish raises
        last.prompt_logprobs = scores  # a stream brings them with its first tokens
        if images and list(last.prompt_token_ids) != token_ids:
            problem = (
                f"the engine and the tokenizer tokenise a prompt with images differently ({len(last.prompt_token_ids)} "
                f"and {len(token_ids)} tokens)"
            )
            remedy = "vLLM and transformers expand this model's images differently: install compatible releases"
            raise ModelError(problem, remedy, field="model", value=images[0])
        return last

    def _with_images(self, token_ids: list[int], images: tuple[str, ...]) -> dict[str, Any]:
        """Return the prompt for vLLM, with one placeholder per image, which vLLM expands itself."""
        if self._images is None:
            remedy = "use a vision-language model, or tasks without images"
            raise ModelError("the model does not accept images", remedy, field="model", value=images[0])
        pictures = [self._images.load(path) for path in images]
        ids = self._images.collapse(token_ids, images)
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}}


def _scored(token_ids: Sequence[int], scores: Scores, count: int) -> Chunk:
    """Return tokens with their log-probs and the ``count`` most probable tokens of every position; vLLM adds the token
    that stands there to them."""
    known = [at or {} for at in scores or ()]
    logprobs = tuple(at[token].logprob for at, token in zip(known, token_ids, strict=True))
    ranked = (sorted(at.items(), key=lambda each: -each[1].logprob)[:count] for at in known if count)
    others = tuple(tuple((token, each.logprob) for token, each in best) for best in ranked)
    return Chunk(tuple(token_ids), logprobs, alternatives=others)


def _own_name() -> str:
    return (ray.get_runtime_context().get_actor_name() or "engine").rpartition(":")[2]


def _core_ended() -> ActorDied:
    return ActorDied("the engine's core process ended", "see its log in the Ray dashboard", field=_own_name())


def _refused(problem: str, value: Any) -> RequestRefused:
    return RequestRefused(problem, "check the requests of the workflow", field="request", value=value)


def prepare_environment(config: EngineConfig) -> None:
    """Set the environment variables that vLLM reads when it is imported."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not config.gpus:
        # Run the core in the actor's process, and pin no engine to a core that another one uses.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["OMP_NUM_THREADS"] = str(max(1, int(config.cpus)))
        if config.enforce_eager:
            # vLLM would still compile sampler helpers, which needs a C++ compiler.
            os.environ["TORCHDYNAMO_DISABLE"] = "1"
