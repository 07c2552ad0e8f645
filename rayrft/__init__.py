"""rayrft: reinforcement fine-tuning of language models, native to Ray.

>>> import rayrft
>>> run = rayrft.start("jobs/quickstart.yaml", **{"stages.mix.steps": 50})  # doctest: +SKIP
>>> run.watch()  # doctest: +SKIP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayrft.benchmark.bench import bench
    from rayrft.config import RunConfig
    from rayrft.core.doctor import doctor
    from rayrft.core.launch import attach, resume, start
    from rayrft.core.plan import plan
    from rayrft.core.run import Run
    from rayrft.core.run_files import RunFiles, read_run
    from rayrft.errors import RayrftError
    from rayrft.experience import Experience, Task
    from rayrft.explorer.environments import Environment, Pictured, Step, register_environment
    from rayrft.explorer.tools import register_tool
    from rayrft.explorer.trajectory import Model, Trajectory
    from rayrft.explorer.workflows import Workflow, register_workflow
    from rayrft.pipelines import register_operator
    from rayrft.rewards import RewardResult, StepReward, Transcript, register_reward
    from rayrft.weights import WeightTransport, register_transport

_MODULES = {
    "rayrft.benchmark.bench": ("bench",),
    "rayrft.config": ("RunConfig",),
    "rayrft.core.doctor": ("doctor",),
    "rayrft.core.launch": ("attach", "resume", "start"),
    "rayrft.core.plan": ("plan",),
    "rayrft.core.run": ("Run",),
    "rayrft.core.run_files": ("RunFiles", "read_run"),
    "rayrft.errors": ("RayrftError",),
    "rayrft.experience": ("Experience", "Task"),
    "rayrft.explorer.environments": ("Environment", "Pictured", "Step", "register_environment"),
    "rayrft.explorer.tools": ("register_tool",),
    "rayrft.explorer.trajectory": ("Model", "Trajectory"),
    "rayrft.explorer.workflows": ("Workflow", "register_workflow"),
    "rayrft.pipelines": ("register_operator",),
    "rayrft.rewards": ("RewardResult", "StepReward", "Transcript", "register_reward"),
    "rayrft.weights": ("WeightTransport", "register_transport"),
}
__all__ = ["Environment", "Experience", "Model", "Pictured", "RayrftError", "RewardResult", "Run", "RunConfig"]
__all__ += ["RunFiles", "Step", "StepReward", "Task", "Trajectory", "Transcript", "WeightTransport", "Workflow"]
__all__ += ["attach", "bench", "doctor", "plan", "read_run", "register_environment", "register_operator"]
__all__ += ["register_reward", "register_tool", "register_transport", "register_workflow", "resume", "start"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: `import rayrft` must be quick, and need neither torch nor Ray.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'rayrft' has no attribute {name!r}")
