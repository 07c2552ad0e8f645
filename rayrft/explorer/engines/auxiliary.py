"""Auxiliary models, as workflows see them: frozen ones, each with its own tokenizer and engines."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rayrft.config.auxiliary import AuxiliaryConfig
from rayrft.data.tokenizer import ChatTokenizer, fills
from rayrft.errors import RequestRefused
from rayrft.explorer.engines.client import EngineClient
from rayrft.explorer.engines.exchange import Completion, Request, Sampling, Session
from rayrft.explorer.engines.pool import EnginePool
from rayrft.runtime.handle import Handle
from rayrft.runtime.waits import Waits


def auxiliary_models(
    configs: Mapping[str, AuxiliaryConfig],
    pools: Mapping[str, Handle[EnginePool]],
    waits: Waits | None = None,
    share: float = 1.0,
) -> dict[str, AuxiliaryModel]:
    """Return the models whose engines are in these pools, by name. ``share``: see `EngineClient`."""
    return {
        name: AuxiliaryModel(
            name,
            configs[name],
            ChatTokenizer(configs[name].model, template=configs[name].template),
            EngineClient(pool, waits or Waits("auxiliary"), share).generate,
        )
        for name, pool in pools.items()
    }


class AuxiliaryModel:
    """One attempt's conversation with a frozen model: what it asks goes to the engine that holds its prefix.

    ``generate`` sends a request to the model's engines. With a ``seed`` the answers do not depend on other requests.
    """

    def __init__(
        self,
        name: str,
        config: AuxiliaryConfig,
        tokenizer: ChatTokenizer,
        generate: Callable[[Request, Sequence[Session]], Awaitable[list[Completion]]],
        seed: int | None = None,
    ) -> None:
        self._name = name
        self._config = config
        self._tokenizer = tokenizer
        self._generate = generate
        self._seed = seed
        self._session = Session()
        self._calls = 0

    def with_seed(self, seed: int | None) -> AuxiliaryModel:
        """Return the same model, for another attempt."""
        return AuxiliaryModel(self._name, self._config, self._tokenizer, self._generate, seed)

    async def chat(
        self,
        messages: list[dict[str, str]],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        json_schema: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the model's answer to a conversation, reasoning included, by default sampled as the config says. With
        a ``json_schema`` it follows that, unless it is cut.

        Raises RequestRefused if the prompt leaves no room for an answer, DataError if the chat template rejects the
        messages, and ActorDied.
        """
        full = fills((message["content"] for message in messages), self._config.max_length)
        prompt = [] if full else self._tokenizer.prompt(messages)
        room = 0 if full else self._config.max_length - len(prompt)
        if room <= 0:
            problem, field = "the prompt leaves no room for an answer", f"auxiliary.{self._name}.max_length"
            raise RequestRefused(problem, "raise it, or ask for less", field=field, value=self._config.max_length)
        self._calls += 1
        sampling = Sampling(
            self._config.temperature if temperature is None else temperature,
            min(max_tokens or self._config.max_tokens, room),
            self._tokenizer.stop_ids,
            None if self._seed is None else (self._seed + self._calls) & 0x7FFFFFFF,
            json_schema=json.dumps(json_schema) if json_schema else "",
        )
        [completion] = await self._generate(Request(prompt, 1, sampling), [self._session])
        return self._tokenizer.answer(completion.token_ids)
