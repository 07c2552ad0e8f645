"""An environment of one's own: `explorer.environment: {name: count_up, options: {turns: 3}}`."""

import rayrft
from rayrft import Step, Task


@rayrft.register_environment("count_up")
class Counting:
    """Asks for the next number, so many times; 1 for each right answer."""

    def __init__(self, turns: int = 3) -> None:
        self._turns, self._count = turns, 0

    async def reset(self, task: Task, seed: int | None = None) -> str:
        self._count = 0
        return "Count from 1. Number?"

    async def step(self, action: str) -> Step:
        self._count += 1
        reward = float(action.strip() == str(self._count))
        return Step("Next?", reward, done=self._count == self._turns)

    async def close(self) -> None: ...
