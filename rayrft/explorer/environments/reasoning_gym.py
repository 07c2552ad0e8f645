"""Tasks of reasoning-gym, tried until they are solved: none of its data sets is interactive by itself."""

from __future__ import annotations

from typing import Any

from rayrft.data.reasoning import split_reasoning
from rayrft.experience import Task, reaches
from rayrft.explorer.environments.base import Step, register_environment


@register_environment("reasoning_gym")
class ReasoningGymEnvironment:
    """The data set's verifier as a game: every action is an answer, and the observation says how good it was.

    An episode ends when an answer scores ``enough``, or after ``attempts``; its reward is the best score, paid as it
    improves. ``dataset`` names the data set of the tasks. An ``<answer>`` is taken from the text if it has one.
    """

    def __init__(self, dataset: str, attempts: int = 5, enough: float = 1.0) -> None:
        from reasoning_gym.factory import create_dataset

        # It is needed for its verifier alone.
        self._dataset = create_dataset(dataset, size=1, seed=0)
        self._attempts, self._enough = attempts, enough

    @staticmethod
    def prepare(**_: Any) -> None:
        """Import the data sets."""
        import reasoning_gym  # noqa: F401

    def reset(self, task: Task, seed: int) -> str:
        self._entry = {"question": task.question, "answer": task.answer, "metadata": task.metadata}
        self._left, self._best = self._attempts, 0.0
        return task.question

    def step(self, action: str) -> Step:
        from reasoning_gym.utils import extract_answer

        answer = split_reasoning(action)[1].strip()
        answer = extract_answer(answer) if "<answer>" in answer else answer
        score = float(self._dataset.score_answer(answer, self._entry))
        self._left -= 1
        earned = max(0.0, score - self._best)
        self._best = max(self._best, score)
        if reaches(score, self._enough):
            return Step("That is right.", earned, done=True, info={"solved": 1})
        told = f"That is not right: it scores {score:.2f} of 1, your best answer {self._best:.2f}."
        return Step(f"{told} Attempts left: {self._left}.", earned, done=self._left == 0)

    def close(self) -> None:
        pass
