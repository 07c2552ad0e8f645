"""A teacher is checked against the model before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rayrft.config.model import TinyModelConfig
from rayrft.data.models import check_teacher, vocabulary_of
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ModelError
from rayrft.trainer.tiny import make_tiny_model


def check(teacher: Path, model: Path) -> None:
    check_teacher(str(teacher), "stages.0.teacher", ChatTokenizer(model), vocabulary_of(str(model)))


def with_vocabulary(change: int, model: Path, folder: Path) -> Path:
    """A copy of a model whose config claims a vocabulary that much larger."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + change}))
    return folder


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
