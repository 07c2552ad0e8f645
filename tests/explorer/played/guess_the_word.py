"""An environment of `verifiers`: the model guesses a word, and is told how many letters are right."""

from __future__ import annotations

import asyncio
from typing import Any

import verifiers as vf
from datasets import Dataset


def load_environment(words: tuple[str, ...] = ("cat", "dog"), **options: Any) -> vf.Environment:
    def right(completion: Any, answer: str) -> float:
        return float(completion[-1]["content"] == answer if completion[-1]["role"] == "assistant" else False)

    rows = [{"question": f"Guess the animal of {len(word)} letters.", "answer": word} for word in words]
    rubric = vf.Rubric(funcs=[right], weights=[2.0])
    return Guessing(
        dataset=Dataset.from_list(rows), system_prompt="Say one word.", rubric=rubric, max_turns=3, **options
    )


class Guessing(vf.MultiTurnEnv):
    def __init__(self, rewrites: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.rewrites = rewrites

    @vf.stop
    async def guessed(self, state: Any) -> bool:
        return bool(state["trajectory"]) and state["trajectory"][-1]["completion"][-1]["content"] == state["answer"]

    async def get_prompt_messages(self, state: Any) -> Any:
        prompt = await super().get_prompt_messages(state)
        return prompt[:1] + prompt[2:] if self.rewrites and len(prompt) > 3 else prompt

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        guess = messages[-1]["content"]
        await asyncio.to_thread(lambda: None)  # as those do that call what blocks
        right = sum(mine == its for mine, its in zip(guess, state["answer"], strict=False))
        return [{"role": "user", "content": f"{right} letters are right."}]
