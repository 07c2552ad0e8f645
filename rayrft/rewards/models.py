"""Learned reward models: a sequence classifier with one output, as Hugging Face has them."""

from __future__ import annotations

from collections.abc import Sequence
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

    Up to ``max_batch`` calls are scored at a time, those of like length together, in forwards of at most
    ``batch_tokens`` tokens with padding; a model without a padding token in its config scores one at a time. What a
    call is scored with changes its value by rounding only: below 1e-5 in float32, more in bfloat16.

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
        max_batch: int = 32,
        batch_tokens: int = 16_384,
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
        self._padding: int | None = loaded.config.get_text_config().pad_token_id
        self.max_batch, self._batch_tokens = (1, 0) if self._padding is None else (max_batch, batch_tokens)

    def score(self, task: Task, transcript: Transcript) -> RewardResult:
        return self.score_batch([(task, transcript)])[0]

    def score_batch(self, calls: Sequence[tuple[Task, Transcript]]) -> list[RewardResult]:
        rows = [self._tokens(transcript) for _, transcript in calls]
        results = dict[int, RewardResult]()
        batch = list[int]()
        for index in sorted(range(len(rows)), key=lambda index: len(rows[index])):
            # The rows come by length, so that the next one says how long all are with padding.
            if batch and (len(batch) + 1) * len(rows[index]) > self._batch_tokens:
                results |= zip(batch, self._forward([rows[each] for each in batch]), strict=True)
                batch = []
            batch.append(index)
        results |= zip(batch, self._forward([rows[each] for each in batch]), strict=True)
        return [results[index] for index in range(len(rows))]

    def _tokens(self, transcript: Transcript) -> list[int]:
        messages = [dict(turn) for turn in transcript.turns]
        encoded = self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)
        tokens: list[int] = encoded["input_ids"]
        return tokens if self._max_length is None else tokens[-self._max_length :]

    def _forward(self, rows: list[list[int]]) -> list[RewardResult]:
        """Score rows of tokens, which are padded on the right to the longest of them."""
        import torch

        longest = max(map(len, rows))
        padding = [0 if self._padding is None else self._padding]
        tokens = torch.tensor([row + padding * (longest - len(row)) for row in rows], device=self._device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=self._device)
        with torch.inference_mode():
            output: Tensor = self._model(tokens, attention_mask=mask).logits.float()
        logits = output.reshape(len(rows))
        values = self._scale * (logits.sigmoid() if self._sigmoid else logits) + self._shift
        return [
            RewardResult.of(value, {"logit": logit}, None)
            for value, logit in zip(values.tolist(), logits.tolist(), strict=True)
        ]


def _refused(model: str, problem: str) -> ModelError:
    remedy = "give a classifier with one output and a tokenizer with a chat template"
    return ModelError(problem, field="reward.options.model", value=model, remedy=remedy)
