"""The loop of model and environment."""

from __future__ import annotations

from itertools import chain
from typing import Literal

from rayrft.data.images import IMAGE_MARK
from rayrft.experience import Task
from rayrft.explorer.environments import EnvironmentClient, Observation, as_messages, images_of
from rayrft.explorer.trajectory import Model, Trajectory
from rayrft.explorer.workflows.base import register_workflow


@register_workflow("episode")
class Episode:
    """Acts in the environment until it is done, at most ``max_steps`` times; a user's message is an observation.

    ``rows``: the episode is one row, or each step is a row that begins with the conversation up to it, of which only
    the last ``history`` steps are kept if it is given.

    ``credit``: every row has the sum of the episode's rewards, or, for algorithms with advantages by turn (`step_wise`,
    `gigpo`), every turn has that of its step. Where the context is full, the rewards so far count. Numbers in steps'
    ``info`` are added up as metrics of the row.
    """

    needs_environment = True

    def __init__(
        self,
        max_steps: int = 20,
        rows: Literal["episode", "step"] = "episode",
        credit: Literal["episode", "step"] = "episode",
        history: int | None = None,
    ) -> None:
        for name, value in {"rows": rows, "credit": credit}.items():
            if value not in ("episode", "step"):
                raise TypeError(f"{name} is {value!r}, not 'episode' or 'step'")
        if history is not None and rows == "episode":
            raise TypeError("history is for rows: step")
        self._max_steps, self._rows, self._credit, self._history = max_steps, rows, credit, history

    async def run(self, task: Task, model: Model, env: EnvironmentClient | None = None) -> list[Trajectory]:
        assert env is not None  # checked when the workflow is built
        system = [{"role": "system", "content": task.system}] if task.system else []

        def shown(observation: Observation) -> list[dict[str, str]]:
            messages, defuse = as_messages(observation), model.tokenizer.defuse
            texts = (IMAGE_MARK.join(map(defuse, each["content"].split(IMAGE_MARK))) for each in messages)
            return [{**each, "content": text} for each, text in zip(messages, texts, strict=True)]

        seen = await env.reset(task)
        parts, images = [shown(seen)], [model.keep(images_of(seen))]
        if parts[0][0]["role"] == "system":
            system, parts[0] = parts[0][:1], parts[0][1:]
        trajectories = [model.start([*system, *parts[0]], images[0])]
        total = 0.0
        for number in range(1, self._max_steps + 1):
            action = await trajectories[-1].act()
            step = await env.step(action)
            total += step.reward
            if self._credit == "step":
                trajectories[-1].step_reward(step.reward)
            for name, value in step.info.items():
                if isinstance(value, int | float):
                    trajectories[-1].count(str(name), value)
            for trajectory in trajectories:
                trajectory.reward(total if self._credit == "episode" else 0.0)
            if step.done or number == self._max_steps:
                break
            parts += [[{"role": "assistant", "content": action}], shown(step.observation)]
            images += [(), model.keep(images_of(step.observation))]
            if self._rows == "episode":
                trajectories[-1].observe(parts[-1], images[-1])
            else:
                first = 0 if self._history is None else -2 * self._history - 1
                messages, pictures = chain.from_iterable(parts[first:]), chain.from_iterable(images[first:])
                trajectories.append(model.start([*system, *messages], [*pictures]))
        return trajectories
