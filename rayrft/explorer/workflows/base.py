"""The workflow protocol and its registry."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol

from rayrft.config.auxiliary import require_auxiliary
from rayrft.config.base import resolved
from rayrft.config.explorer import ExplorerConfig
from rayrft.errors import ConfigError
from rayrft.experience import Task
from rayrft.explorer.environments import EnvironmentClient
from rayrft.explorer.trajectory import Model, Trajectory
from rayrft.explorer.workflows.isolated import Isolated
from rayrft.registry import Registry


class Workflow(Protocol):
    """One attempt at a task: starts a trajectory, lets the model act, and appends observations. Several trajectories
    are rows of one attempt, such as its turns as separate rows. ``env`` is the attempt's own, if the config names an
    environment. A workflow that cannot do without one says so by a class attribute ``needs_environment = True``, and
    names the auxiliary models that it needs in an attribute ``needs_auxiliary``. One whose first prompt is not
    ``task.messages`` has ``opening(task, tokenizer)``, its messages and tools, by which prompts are measured before a
    run.

    One instance serves all tasks of a run, in the Explorer's event loop, and must not block it. One that may block has
    a class attribute ``blocking = True``: each attempt has an instance and a process of its own, in which ``model`` and
    ``env`` are handles to those in the Explorer. They have the same methods, but no tokenizer."""

    async def run(
        self, task: Task, model: Model, env: EnvironmentClient | None = None
    ) -> Trajectory | list[Trajectory]: ...


workflows: Registry[Callable[..., Workflow]] = Registry("workflow")
"""Name to class or factory, which is called with its options in ``explorer.workflow_options``."""
register_workflow = workflows.register


def build_workflow(
    name: str, config: ExplorerConfig, field: str = "explorer.workflow", *, auxiliary: Collection[str] = ()
) -> Workflow:
    """Create the workflow with that registered name, or of the class at ``package.module:attribute``. ``auxiliary`` are
    the names of the auxiliary models.

    Raises ConfigError for ``field`` if there is none or its ``run`` is no coroutine function, for
    ``explorer.workflow_options`` if it rejects them, and for ``explorer.environment`` or ``auxiliary`` if it needs one
    that is not configured.
    """
    factory, options = workflows.get(name, field), config.workflow_options.get(name, {})
    create = partial(factory, **resolved(options))
    try:
        workflow = create()
    except TypeError as error:
        problem, remedy = f"workflow {name!r} rejects its options: {error}", "see the parameters of the workflow"
        raise ConfigError(problem, remedy, field=f"explorer.workflow_options.{name}", value=options) from None
    if getattr(workflow, "needs_environment", False) and config.environment is None:
        problem = f"workflow {name!r} acts in an environment"
        raise ConfigError(problem, "name one, or choose another workflow", field="explorer.environment", value=None)
    require_auxiliary(getattr(workflow, "needs_auxiliary", ()), auxiliary)
    if not inspect.iscoroutinefunction(inspect.unwrap(getattr(workflow, "run", None))):  # type: ignore[arg-type]
        remedy = "write async def run, and blocking = True in its class if it may block"
        raise ConfigError(f"run() of workflow {name!r} is no coroutine function", remedy, field=field, value=name)
    return Isolated(create, config.workflow_processes) if getattr(workflow, "blocking", False) else workflow
