"""Learned reward models: a sequence classifier with one output, as Hugging Face has them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rayrft.errors import ModelError
from rayrft.experience import Task
from rayrft.rewards.base import RewardResult, Transcript, imports, register_reward

if TYPE_CHECKING:
    from torch import Tensor


@register_reward("model")
@imports("torch", "transformers")
class ScalarModel:
    """The output of a frozen `AutoModelForSequenceClassification` on the whole conversation.

    ``model`` is a folder or hub id with its tokenizer, at the hub's ``revision``. The conversation is formatted by the
    chat template of the model, which must have one. Of one with more than ``max_length`` tokens, by default all that
    the model has positions for, the first ones are left out. The value is ``scale`` times the output, after ``sigmoid``
    if that is set, plus ``shift``; component ``logit`` is the output itself.

    Raises ModelError if the model cannot be loaded, has several outputs or no chat template.
    """

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        sigmoid: bool = False,
        scale: float = 1.0,
        shift: float = 0.0,
        max_length: int | None = None,
        device: str = "cpu",
        dtype: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        path = str(Path(model).expanduser().absolute()) if Path(model).expanduser().is_dir() else model
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(path, revision=revision)
            loaded = AutoModelForSequenceClassification.from_pretrained(
                path, revision=revision, dtype=getattr(torch, dtype)
            )
        except (OSError, ValueError) as error:
            raise _refused(model, f"cannot be loaded as a sequence classifier: {error}") from None
        if loaded.config.num_labels != 1:
            raise _refused(model, f"has {loaded.config.num_labels} outputs, and a reward is one")
        if not self._tokenizer.chat_template:
            raise _refused(model, "has no chat template")
        self._model: Any = loaded.to(device).eval().requires_grad_(False)
        self._device, self._sigmoid, self._scale, self._shift = device, sigmoid, scale, shift
        self._max_length = max_length or getattr(loaded.config, "max_position_embeddings", None)

    def score(self, task: Task, transcript: Transcript) -> RewardResult:
        import torch

        messages = [dict(turn) for turn in transcript.turns]
        encoded = self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
        tokens: list[int] = encoded["input_ids"]
        if self._max_length is not None:
            tokens = tokens[-self._max_length :]
        with torch.inference_mode():
            output: Tensor = self._model(torch.tensor([tokens], device=self._device)).logits.float()
        logit = output.reshape(())
        value = self._scale * float(logit.sigmoid() if self._sigmoid else logit) + self._shift
        return RewardResult.of(value, {"logit": float(logit)}, None)


def _refused(model: str, problem: str) -> ModelError:
    remedy = "give a classifier with one output and a tokenizer with a chat template"
    return ModelError(problem, field="reward.options.model", value=model, remedy=remedy)
