"""Models are checked before anything starts: their length, and a teacher against the policy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from rayrft.config.auxiliary import AuxiliaryConfig
from rayrft.config.explorer import EngineConfig
from rayrft.config.model import TinyModelConfig
from rayrft.data.models import (
    attention_cost,
    check_auxiliary,
    check_cache,
    check_length,
    check_teacher,
    find_model,
    vocabulary_of,
)
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ModelError
from rayrft.trainer.tiny import make_tiny_model
from tests.errors import about


def check(teacher: Path, model: Path) -> None:
    check_teacher(str(teacher), "stages.0.teacher", ChatTokenizer(model), vocabulary_of(str(model)))


def with_config(model: Path, folder: Path, **changes: Any) -> Path:
    """A copy of a model with another config."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def with_vocabulary(change: int, model: Path, folder: Path) -> Path:
    """A copy of a model whose config claims a vocabulary that much larger."""
    return with_config(model, folder, vocab_size=vocabulary_of(str(model)) + change)


@pytest.mark.parametrize(
    ("kind", "changes", "cost"),
    [
        # Qwen3-0.6B: 28 layers of 16 x 128, over 1024 (28 (2 x 128 (16 + 8) + 3 x 3072) + 151936) weights
        ("qwen3", {"intermediate_size": 3072}, 57344 / 595984384),
        # Of 64 experts a token has four of 256; half of the layers attend to a window.
        (
            "qwen3_moe",
            {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "max_window_layers": 14}
            | {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 14},
            28672 / (1024 * (28 * (6144 + 3072) + 151936)),
        ),
    ],
)
def test_the_cost_of_attention_is_its_products_over_those_of_the_weights_of_a_token(
    kind: str, changes: dict[str, Any], cost: float, tmp_path: Path
) -> None:
    shape = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    shape |= {"model_type": kind, "head_dim": 128, "vocab_size": 151936}
    (tmp_path / "config.json").write_text(json.dumps(shape | changes))
    assert attention_cost(str(tmp_path)) == pytest.approx(cost)


def test_a_teacher_of_the_same_tokenizer_will_do_also_with_spare_tokens(tiny_model: Path, tmp_path: Path) -> None:
    check(tiny_model, tiny_model)
    check(with_vocabulary(64, tiny_model, tmp_path / "wide"), tiny_model)


def test_a_teacher_with_another_tokenizer_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    small = TinyModelConfig(layers=1, hidden_size=32, heads=1)
    make_tiny_model(small, ["Reverse it: tac"] * 2, [], tmp_path / "other", max_length=32, seed=0)
    with pytest.raises(ModelError, match=r"stages\.0\.teacher: the teacher's tokenizer is not the model's: token '.*'"):
        check(tmp_path / "other", tiny_model)


def test_a_teacher_that_does_not_know_all_tokens_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"a vocabulary of \d+, and the model, of \d+, may sample tokens beyond it"):
        check(with_vocabulary(-1, tiny_model, tmp_path / "narrow"), tiny_model)


def test_a_teacher_that_is_not_there_is_named(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"stages\.0\.teacher: the folder contains no model"):
        check(tmp_path, tiny_model)


@pytest.mark.parametrize(("text", "said"), [("", "OSError"), ("\nnot found\nat the hub", "not found")])
def test_an_error_with_or_without_a_text_is_told_in_one_line(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", Mock(side_effect=OSError(text)))
    with pytest.raises(ModelError, check=lambda error: error.problem == f"no such model: {said}"):
        find_model("nobody/nothing", "model.path")


@pytest.mark.parametrize(("rope", "most"), [({}, 100), ({"rope_type": "linear", "factor": 4.0}, 400)])
def test_a_model_with_fewer_positions_than_its_longest_text_is_refused(
    rope: dict[str, Any], most: int, tiny_model: Path, tmp_path: Path
) -> None:
    rotary = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **rope}}
    short = str(with_config(tiny_model, tmp_path / "short", max_position_embeddings=100, **rotary))
    check_length(short, most, "model.max_length")
    judge = {"judge": AuxiliaryConfig(model=short, max_length=most + 1)}
    with pytest.raises(ModelError, match=f"at most {most}", check=about("auxiliary.judge.max_length", most + 1)):
        check_auxiliary(judge)


def test_a_cache_without_room_for_the_longest_row_is_refused_before_an_engine_starts(
    tiny_model: Path, tmp_path: Path
) -> None:
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    sizes["max_position_embeddings"] = 4096
    fitting, engine, field = (8 << 20) // (2 * 4 * 2 * 64 * 4), EngineConfig(kv_cache_mib=8), "explorer.engine"
    model = str(with_config(tiny_model, tmp_path / "full", layer_types=["full_attention"] * 4, **sizes))
    check_cache(model, fitting, "float32", engine, field)
    check_cache(model, 2 * fitting, "bfloat16", engine, field)
    check_cache(model, fitting + 1, "float32", EngineConfig(gpus=1), field)
    with pytest.raises(ModelError, match="takes 9 MiB", check=about(f"{field}.kv_cache_mib", 8)):
        check_cache(model, fitting + 1, "float32", engine, field)
    judge = {"judge": AuxiliaryConfig(model=model, max_length=fitting + 1, engine=engine)}
    with pytest.raises(ModelError, check=about("auxiliary.judge.engine.kv_cache_mib", 8)):
        check_auxiliary(judge)
    windows = ["full_attention", "sliding_attention"] * 2
    part = str(with_config(tiny_model, tmp_path / "part", layer_types=windows, **sizes))
    check_cache(part, fitting + 1, "float32", engine, field)  # a window keeps less
