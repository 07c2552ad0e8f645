"""The workflow protocol, its registry, and checks of workflows before a run starts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from rayrft.config.auxiliary import require_auxiliary
from rayrft.config.base import resolved
from rayrft.config.explorer import ExplorerConfig
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ConfigError, DataError, RayrftError
from rayrft.experience import Task
from rayrft.explorer.environments import EnvironmentClient, check_environment
from rayrft.explorer.trajectory import Model, Trajectory
from rayrft.explorer.workflows.isolated import IsolatedWorkflow
from rayrft.registry import Registry


class Workflow(Protocol):
    """One attempt at a task: starts a trajectory, lets the model act, and appends observations. Several trajectories
    are rows of one attempt, such as its turns. ``env`` is the attempt's own, if the config names an environment. A
    workflow that cannot do without one says so by a class attribute ``needs_environment = True``, and names the
    auxiliary models that it needs in an attribute ``needs_auxiliary``. One whose first prompt is not ``task.messages``
    has ``opening(task, tokenizer)``, its messages and tools, by which prompts are measured before a run.

    One instance serves all tasks of a run, in the Explorer's event loop, and must not block it. One that may block has
    a class attribute ``blocking = True``. Then each attempt has an instance and a process of its own, in which
    ``model`` and ``env`` are handles to those in the Explorer. They have the same methods, but no tokenizer."""

    async def run(
        self, task: Task, model: Model, env: EnvironmentClient | None = None
    ) -> Trajectory | list[Trajectory]: ...


workflows: Registry[Callable[..., Workflow]] = Registry("workflow")
"""Name to class or factory, which is called with its options in ``explorer.workflow_options``."""
register_workflow = workflows.register
# Applications that call an endpoint, whose package is above this one.
workflows.register_at("agent", "rayrft.endpoint.agent:Agent")
workflows.register_at("program", "rayrft.endpoint.program:Program")
workflows.register_at("verifiers", "rayrft.endpoint.verifiers:Verifiers")


def build_workflow(
    name: str, config: ExplorerConfig, field: str = "explorer.workflow", *, auxiliary: Collection[str] = ()
) -> Workflow:
    """Create the workflow of a registered name or ``package.module:attribute``; ``auxiliary``: names of models.

    Raises ConfigError for ``field`` if there is none or its ``run`` is not a coroutine function. Raises it for
    ``explorer.workflow_options`` if it rejects them, and for ``explorer.environment`` or ``auxiliary`` if it needs one
    that is not configured.
    """
    factory, options = workflows.get(name, field), config.workflow_options.get(name, {})
    create = partial(factory, **resolved(options))
    try:
        workflow = create()
    except RayrftError as error:
        if error.field in options:
            error.field = f"explorer.workflow_options.{name}.{error.field}"
        raise
    except Exception as error:  # a user's constructor may raise anything
        kind = "" if isinstance(error, TypeError) else f"{type(error).__name__}: "
        problem, remedy = f"workflow {name!r} rejects its options: {kind}{error}", "see the parameters of the workflow"
        raise ConfigError(problem, remedy, field=f"explorer.workflow_options.{name}", value=options) from error
    if getattr(workflow, "needs_environment", False) and config.environment is None:
        problem = f"workflow {name!r} acts in an environment"
        raise ConfigError(problem, "name one, or choose another workflow", field="explorer.environment", value=None)
    require_auxiliary(getattr(workflow, "needs_auxiliary", ()), auxiliary)
    if not inspect.iscoroutinefunction(inspect.unwrap(getattr(workflow, "run", None))):  # type: ignore[arg-type]
        remedy = "write async def run, and blocking = True in its class if it may block"
        raise ConfigError(f"run() of workflow {name!r} is not a coroutine function", remedy, field=field, value=name)
    try:
        inspect.signature(workflow.run).bind("task", "model", "env")
    except TypeError as error:
        problem = f"run() of workflow {name!r} cannot be called: {error}"
        raise ConfigError(problem, "write run(self, task, model, env=None)", field=field, value=name) from None
    return IsolatedWorkflow(create, config.workflow_processes) if getattr(workflow, "blocking", False) else workflow


def check_workflows(
    config: ExplorerConfig, tasks: Iterable[Task], auxiliary: Collection[str] = (), plugins: Sequence[Path] = ()
) -> dict[str | None, Workflow]:
    """Return the config's workflow (None) and those that tasks name. Raises ConfigError unless they and the environment
    can be built, and a workflow acts in it."""
    built: dict[str | None, Workflow] = {None: build_workflow(config.workflow, config, auxiliary=auxiliary)}
    if config.environment is not None:
        check_environment(config.environment, plugins)
    for name in {task.workflow for task in tasks if task.workflow}:
        built[name] = build_workflow(name, config, "workflow of a task", auxiliary=auxiliary)
    if config.environment is not None and not any(map(_may_act, built.values())):
        remedy = "set it to episode or a workflow of your own, or remove explorer.environment"
        raise ConfigError("does not act in the environment", remedy, field="explorer.workflow", value=config.workflow)
    return built


def _may_act(workflow: Workflow) -> bool:
    """Return whether a workflow may act in an environment; of those of this package, one says so."""
    is_own = isinstance(workflow, IsolatedWorkflow) or not type(workflow).__module__.startswith("rayrft.")
    return is_own or getattr(workflow, "needs_environment", False)


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
