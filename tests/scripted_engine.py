"""An engine without vLLM, for whole runs in which vLLM is not the subject: it starts at once, and takes little memory.

`tests/without_vllm.py`, as a plugin of the run, puts it in the place of the real one.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from rayrft.explorer.engines.engine import EngineWeights
from rayrft.explorer.engines.exchange import Answering, Chunk, Completion, Request, Sampling, Stream
from rayrft.runtime.handle import Watched, once
from rayrft.weights.messages import Link


class ScriptedEngine(Answering, Watched):
    """Answers at once, with tokens of the prompt that are drawn by the request's seed, each with log-prob -1.

    It meets the trainer and receives every broadcast as a real engine does, digests it, and forgets it.
    """

    @once
    async def start(self, *_: Any, **settings: Any) -> None:
        self._held = EngineWeights(0, ("",))

    async def generate(self, request: Request, stream: Stream | None = None) -> list[Completion]:
        rng = random.Random(request.sampling.seed)
        answers = [self._answer(request.prompt, request.sampling, rng) for _ in range(request.n)]
        for token, logprob in zip(answers[0].token_ids, answers[0].logprobs, strict=True) if stream else ():
            stream.add(Chunk((token,), (logprob,), (self._held.version,)))
            await asyncio.sleep(0.01)  # as if it were decoding
        return answers

    async def score(self, token_ids: list[int], images: tuple[str, ...] = ()) -> list[float]:
        return [-1.0] * (len(token_ids) - 1)

    async def connect(self, link: Link, first: int) -> None:
        import torch  # here, for it takes seconds, and every process that loads the plugin imports this module

        from rayrft.weights.channel import WeightChannel

        cpu = torch.device("cpu")
        self._channel = await asyncio.to_thread(WeightChannel, link, sends=False, index=first, device=cpu)

    async def respond(self) -> int:
        return self._held.version

    async def pause(self, keep_cache: bool = False) -> None:
        pass

    async def receive(self, number: int, version: int) -> EngineWeights:
        self._held = EngineWeights(version, (await asyncio.to_thread(self._receive, number),))
        return self._held

    async def resume(self) -> None:
        pass

    def _answer(self, prompt: list[int], sampling: Sampling, rng: random.Random) -> Completion:
        ordinary = sorted(set(prompt) - set(sampling.stop_token_ids))
        length = rng.randrange(1, sampling.max_tokens)
        ids = (*rng.choices(ordinary, k=length), sampling.stop_token_ids[0])
        return Completion(ids, (-1.0,) * len(ids), ((0, len(ids), self._held.version),), "stop")

    def _receive(self, number: int) -> str:
        from rayrft.weights.buckets import Digest

        digest = Digest()
        for _ in self._channel.receive(self._channel.announced(number), digest):
            pass
        return digest.value
