"""Checks of workflows before a run starts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from rayrft.config.explorer import ExplorerConfig
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import DataError
from rayrft.experience import Task
from rayrft.explorer.environments import environment_factory
from rayrft.explorer.workflows import Workflow, build_workflow


def check_workflows(
    config: ExplorerConfig, tasks: Iterable[Task], auxiliary: Collection[str] = ()
) -> dict[str | None, Workflow]:
    """Return the config's workflow (None) and those that tasks name. Raises ConfigError unless they and the environment
    can be built."""
    built: dict[str | None, Workflow] = {None: build_workflow(config.workflow, config, auxiliary=auxiliary)}
    if config.environment is not None:
        environment_factory(config.environment)
    for name in {task.workflow for task in tasks if task.workflow}:
        built[name] = build_workflow(name, config, "workflow of a task", auxiliary=auxiliary)
    return built


def check_prompts(
    tasks: list[Task], tokenizer: ChatTokenizer, workflows: Mapping[str | None, Workflow], limit: int
) -> list[str]:
    """Measure first prompts; return a notice if some are longer than ``limit`` tokens. Raises DataError if all are, or
    the chat template refuses one."""

    def length(task: Task) -> int:
        opening = getattr(workflows[task.workflow or None], "opening", None)
        messages, tools = opening(task, tokenizer) if opening is not None else (task.messages, ())
        try:
            return len(tokenizer.prompt(messages, task.images, tools))
        except DataError as error:
            raise DataError(error.problem, error.remedy, field="tasks", value=task.id) from None

    # Sampled over all tasks: a file may be sorted by length, and sources follow one another.
    lengths = [length(task) for task in tasks[:: max(1, len(tasks) // 200)]]
    if min(lengths) > limit:
        field, remedy = "explorer.sampling.max_prompt_tokens", "raise it, and model.max_length with it"
        problem = f"every prompt is longer than the limit (shortest of {len(lengths)}: {min(lengths)} tokens)"
        raise DataError(problem, remedy, field=field, value=limit)
    long = sum(each > limit for each in lengths)
    return [f"{long} of {len(lengths)} prompts are longer than {limit} tokens: such tasks are dropped"] if long else []
