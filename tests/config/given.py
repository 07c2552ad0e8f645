"""Configs that tests begin with."""

from __future__ import annotations

from typing import Any

SPELL = {"name": "spell", "source": "reasoning_gym", "dataset": "spell_backward", "size": 10}
GRPO = {"name": "grpo", "algorithm": {"name": "grpo"}, "steps": 1, "batch_size": 8, "group_size": 2}


def base() -> dict[str, Any]:
    """A run of one MIX stage, named ``mix``."""
    mix = {"name": "mix", "algorithm": {"name": "mix", "mu": 0.1}, "steps": 3, "batch_size": 40, "group_size": 8}
    return {
        "name": "a",
        "model": {"tiny": {}, "max_length": 64},
        "tasks": {"sources": [{"source": "reasoning_gym", "dataset": "spell_backward", "size": 10}]},
        "explorer": {"sampling": {"max_tokens": 8, "max_prompt_tokens": 40}},
        "demonstrations": {"expert": {"size": 10}},
        "stages": [{**mix, "expert_share": 0.2, "demonstrations": "expert"}],
    }


def bench(**overrides: Any) -> dict[str, Any]:
    """A bench of one model on one task set."""
    return {
        "name": "a",
        "mode": "bench",
        "model": {"max_length": 64},
        "explorer": {"sampling": {"max_tokens": 8, "max_prompt_tokens": 40}},
        "bench": {"models": {"one": "runs/one"}, "tasksets": {"words": SPELL}, **overrides},
    }
