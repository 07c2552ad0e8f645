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
from transformers import AutoModelForCausalLM

from rayrft.config.explorer import EngineConfig
from rayrft.explorer.engines.engine import RolloutEngine
from rayrft.trainer.loading import load_policy
from rayrft.trainer.model import named_weights
from tests.explorer.test_engine import EngineUnderTest, linked
from tests.trainer.test_loading import FAMILIES

FRESH = 1e-5
"""Largest difference of log-probs."""
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""Smaller heads are not supported by vLLM's attention on CPUs."""
ROWS = [[5, 40, 41, 42, 43, 3, 50, 51, 12], [2, 60, 3, 44], [7] * 20]


def written(family: str, folder: Path, vision: Path) -> None:
    """Write a random model of a family."""
    if family == "qwen2-vl":
        shutil.copytree(vision, folder)
        return
    torch.manual_seed(0)
    config = copy.deepcopy(FAMILIES[family.replace("untied", "tied")])
    config.update(SHAPE)
    config.tie_word_embeddings &= "untied" not in family
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, "qwen3, untied", "qwen2-vl"])
def test_an_engine_that_received_weights_equals_one_that_was_started_with_them(
    family: str, ray_cluster: Any, tmp_path: Path, tiny_vision_model: Path
) -> None:
    folder = tmp_path / "model"
    written(family, folder, tiny_vision_model)
    actor = ray.remote(RolloutEngine).options(num_cpus=0.5, max_concurrency=1000).remote()
    ray.get(actor.start.remote(str(folder), EngineConfig(), max_length=32, dtype="float32", seed=0))
    engine = EngineUnderTest(actor, folder, linked(actor, 1))

    def scores() -> np.ndarray:
        return np.concatenate([ray.get(actor.score.remote(row)) for row in ROWS])

    fresh = scores()
    own = {name: tensor.clone() for name, tensor in named_weights(load_policy(str(folder)))}
    chance = torch.Generator().manual_seed(1)
    other = {name: tensor + 0.1 * torch.randn(tensor.shape, generator=chance) for name, tensor in own.items()}
    for version in (1, 3):
        engine.update(other.items(), version)
        assert np.abs(scores() - fresh).max() > 0.01, "the engine ignores what it receives"
        engine.update(own.items(), version + 1)
        assert np.abs(scores() - fresh).max() <= FRESH
    ray.kill(actor)
