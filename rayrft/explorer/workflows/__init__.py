"""Workflows: one attempt at a task. The runner (`rayrft.explorer.rollout`) repeats it and scores the trajectories."""

from rayrft.explorer.workflows import chat, episode, tools  # noqa: F401  (they register their workflows)
from rayrft.explorer.workflows.base import Workflow, build_workflow, register_workflow, workflows

__all__ = ["Workflow", "build_workflow", "register_workflow", "workflows"]
