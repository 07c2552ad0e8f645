"""After a reload, an engine of any family equals one that was started from the same weights."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from rayrft.config.explorer import EngineConfig
from rayrft.explorer.engines.engine import RolloutEngine
from rayrft.trainer.loading import load_policy
from rayrft.trainer.model import named_weights
from tests.explorer.live_engine import EngineUnderTest, linked
from tests.trainer.families import FAMILIES

FRESH = 1e-5
"""Largest difference of log-probs."""
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""Smaller heads are not supported by vLLM's attention on CPUs."""
ROWS = [[5, 40, 41, 42, 43, 3, 50, 51, 12], [2, 60, 3, 44], [7] * 20]


def written(family: str, folder: Path, vision: Path, seed: int) -> Path:
    """Write a random model of a family."""
    torch.manual_seed(seed)
    if family == "qwen2-vl":
        shutil.copytree(vision, folder)
        model = AutoModelForImageTextToText.from_pretrained(vision)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    else:
        config = copy.deepcopy(FAMILIES[family.replace("untied", "tied")])
        config.update(SHAPE)
        config.tie_word_embeddings &= "untied" not in family
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def started(folder: Path) -> Any:
    actor = ray.remote(RolloutEngine).options(num_cpus=0.5, max_concurrency=1000).remote()
    ray.get(actor.start.remote(str(folder), EngineConfig(), max_length=32, dtype="float32", seed=0))
    return actor


def scores(actor: Any) -> np.ndarray:
    return np.concatenate([ray.get(actor.score.remote(row)) for row in ROWS])


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, "qwen3, untied", "qwen2-vl"])
def test_an_engine_that_received_weights_equals_one_that_was_started_with_them(
    family: str, ray_cluster: Any, tmp_path: Path, tiny_vision_model: Path
) -> None:
    first, second = (written(family, tmp_path / str(seed), tiny_vision_model, seed) for seed in (1, 2))
    other = started(second)
    expected = scores(other)
    ray.kill(other)
    actor = started(first)
    fresh = scores(actor)
    assert np.abs(expected - fresh).max() > 0.01
    engine = EngineUnderTest(actor, first, linked(actor, 1))
    for version, (folder, found) in enumerate([(second, expected), (first, fresh), (second, expected)], 1):
        engine.update(named_weights(load_policy(str(folder))), version)
        assert np.abs(scores(actor) - found).max() <= FRESH, version
    ray.kill(actor)
