"""rayrft: reinforcement fine-tuning of language models, native to Ray.

>>> import rayrft
>>> run = rayrft.start("jobs/quickstart.yaml", **{"stages.mix.steps": 50})  # doctest: +SKIP
>>> run.watch()  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayrft.benchmark.bench import bench
    from rayrft.config import RunConfig
    from rayrft.core.launch import attach, resume, start
    from rayrft.core.run import Run
    from rayrft.errors import RayrftError
    from rayrft.experience import Experience, Task
    from rayrft.explorer.environments import Environment, Pictured, Step, register_environment
    from rayrft.explorer.tools import register_tool
    from rayrft.explorer.trajectory import Model, Trajectory
    from rayrft.explorer.workflows import Workflow, register_workflow
    from rayrft.pipelines import register_operator
    from rayrft.rewards import RewardResult, StepReward, Transcript, register_reward
    from rayrft.weights import WeightTransport, register_transport

_HOME = {
    "Experience": "rayrft.experience",
    "Task": "rayrft.experience",
    "RunConfig": "rayrft.config",
    "Run": "rayrft.core.run",
    "attach": "rayrft.core.launch",
    "bench": "rayrft.benchmark.bench",
    "resume": "rayrft.core.launch",
    "start": "rayrft.core.launch",
    "RayrftError": "rayrft.errors",
    "Environment": "rayrft.explorer.environments",
    "Pictured": "rayrft.explorer.environments",
    "Step": "rayrft.explorer.environments",
    "register_environment": "rayrft.explorer.environments",
    "register_tool": "rayrft.explorer.tools",
    "Model": "rayrft.explorer.trajectory",
    "Trajectory": "rayrft.explorer.trajectory",
    "Workflow": "rayrft.explorer.workflows",
    "register_workflow": "rayrft.explorer.workflows",
    "register_operator": "rayrft.pipelines",
    "RewardResult": "rayrft.rewards",
    "StepReward": "rayrft.rewards",
    "Transcript": "rayrft.rewards",
    "register_reward": "rayrft.rewards",
    "WeightTransport": "rayrft.weights",
    "register_transport": "rayrft.weights",
}
__all__ = [
    "Environment",
    "Experience",
    "Model",
    "Pictured",
    "RayrftError",
    "RewardResult",
    "Run",
    "RunConfig",
    "Step",
    "StepReward",
    "Task",
    "Trajectory",
    "Transcript",
    "WeightTransport",
    "Workflow",
    "attach",
    "bench",
    "register_environment",
    "register_operator",
    "register_reward",
    "register_tool",
    "register_transport",
    "register_workflow",
    "resume",
    "start",
]


def __getattr__(name: str) -> Any:
    # Loaded on first use: `import rayrft` must be quick, and need neither torch nor Ray.
    if name not in _HOME:
        raise AttributeError(f"module 'rayrft' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
