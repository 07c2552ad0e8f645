"""Learned reward models of Hugging Face: classifiers of conversations, and of the steps of answers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from rayrft.config.base import local_model
from rayrft.errors import ConfigError, ModelError, first_line
from rayrft.experience import Task
from rayrft.rewards.base import RewardResult, StepReward, Transcript, imports, register_reward

if TYPE_CHECKING:
    from torch import Tensor

Dtype = Literal["float32", "bfloat16"]
Tokens = list[int]


class _Classifier(ABC):
    """A frozen classifier with its tokenizer, which scores several calls at a time."""

    def __init__(
        self,
        of: Literal["Sequence", "Token"],
        model: str,
        revision: str | None,
        device: str,
        dtype: Dtype,
        max_batch: int,
        batch_tokens: int,
    ) -> None:
        import torch
        import transformers

        labels = {"Sequence": 1, "Token": 2}[of]
        path = local_model(model)
        classifier: Any = getattr(transformers, f"AutoModelFor{of}Classification")
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path, revision=revision)
            loaded = classifier.from_pretrained(path, revision=revision, dtype=getattr(torch, dtype))
        except (OSError, ValueError) as error:
            problem = f"cannot be loaded as a {of.lower()} classifier: {first_line(error)}"
            raise _refused(model, labels, problem) from None
        if loaded.config.num_labels != labels:
            raise _refused(model, labels, f"has {loaded.config.num_labels} outputs instead of {labels}")
        if not self._tokenizer.chat_template:
            raise _refused(model, labels, "has no chat template")
        self._model: Any = loaded.to(device).eval().requires_grad_(False)
        self._device, self._batch_tokens = device, batch_tokens
        self._padding: int | None = loaded.config.get_text_config().pad_token_id
        self._positions: int | None = getattr(loaded.config, "max_position_embeddings", None)
        self.max_batch = 1 if self._padding is None else max_batch

    def score(self, task: Task, transcript: Transcript) -> RewardResult:
        """See `RewardModel`."""
        return self.score_batch([(task, transcript)])[0]

    @abstractmethod
    def score_batch(self, calls: Sequence[tuple[Task, Transcript]]) -> list[RewardResult]:
        """See `Reward`."""

    def _tokens(self, turns: Sequence[Any], *, answering: bool = False) -> Tokens:
        """Return the tokens of a conversation, with the template's beginning of an answer if ``answering``."""
        messages = [dict(turn) for turn in turns]
        options = {"tokenize": True, "return_dict": True, "add_generation_prompt": answering}
        return list(self._tokenizer.apply_chat_template(messages, **options)["input_ids"])

    def _text(self, text: str) -> Tokens:
        """Return the tokens of a text alone."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _outputs(self, rows: Sequence[Tokens]) -> list[Tensor]:
        """Return the outputs of each row on the CPU, ``[labels]``, or ``[tokens, labels]`` of a token classifier. Rows
        of a batch are padded on the right to the longest of them."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        batches = list[list[int]]()
        for index in sorted(range(len(rows)), key=lambda index: len(rows[index])):
            # Rows are sorted by length: with padding, all of a batch are as long as the next one.
            alone = not batches or self._padding is None
            if alone or (len(batches[-1]) + 1) * len(rows[index]) > self._batch_tokens:
                batches.append([])
            batches[-1].append(index)
        found = dict[int, "Tensor"]()
        for batch in batches:
            texts = [torch.tensor(rows[index], dtype=torch.long, device=self._device) for index in batch]
            tokens = pad_sequence(texts, batch_first=True, padding_value=self._padding or 0)
            mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
            with torch.inference_mode():
                logits: Tensor = self._model(tokens, attention_mask=mask).logits
            found |= zip(batch, logits.float().cpu(), strict=True)
        return [found[index] for index in range(len(rows))]


@register_reward("model")
@imports("torch", "transformers")
class ScalarModel(_Classifier):
    """The output of a frozen `AutoModelForSequenceClassification` on the whole conversation.

    ``model`` is a folder or hub id with a tokenizer and its chat template, at the hub's ``revision``. A conversation
    keeps its last ``max_length`` tokens, by default as many as the model has positions. The value is ``scale`` times
    the output, after ``sigmoid`` if set, plus ``shift``; component ``logit`` is the output.

    Up to ``max_batch`` calls are scored at a time, by length, in forwards of at most ``batch_tokens`` tokens with
    padding; a model without a padding token scores one at a time. The other calls of a batch change a value by rounding
    only: below 1e-5 in float32, more in bfloat16.

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
        dtype: Dtype = "float32",
    ) -> None:
        super().__init__("Sequence", model, revision, device, dtype, max_batch, batch_tokens)
        self._sigmoid, self._scale, self._shift = sigmoid, scale, shift
        self._max_length = max_length or self._positions

    def score_batch(self, calls: Sequence[tuple[Task, Transcript]]) -> list[RewardResult]:
        rows = [self._tokens(transcript.turns) for _, transcript in calls]
        outputs = self._outputs([row[-self._max_length :] if self._max_length else row for row in rows])
        logits = [float(output) for output in outputs]
        squashed = [1 / (1 + math.exp(-logit)) if self._sigmoid else logit for logit in logits]
        values = [self._scale * value + self._shift for value in squashed]
        return [RewardResult(value, {"logit": logit}) for value, logit in zip(values, logits, strict=True)]


_REDUCED: dict[str, Callable[[Sequence[float]], float]]
_REDUCED = {"min": min, "product": math.prod, "mean": fmean, "last": itemgetter(-1)}


@register_reward("process_model")
@imports("torch", "transformers")
class ProcessModel(_Classifier):
    """The probability that the steps of the answers are right, by a frozen `AutoModelForTokenClassification` with two
    labels, of which label 1 is right. This is a process reward model (Lightman et al. 2023, "Let's Verify Step by
    Step", arXiv:2305.20050) in the form of TRL's PRMTrainer.

    An answer is split at every ``separator``. The model reads the messages before it by its chat template, then each
    step with the separator; the probability of a step is that of label 1 at the separator's last token. The value is
    the ``min``, ``product`` (the paper's), ``mean`` or ``last`` of all steps. ``per: turn`` also rewards each turn by
    its own steps, ``per: step`` each step, which ends with its separator; ``per: answer`` neither. Components:
    ``steps``, their number, and ``right``, the number of steps above .5 before the first that is not.

    The other options are those of reward `model`. An answer longer than the model's positions is unknown. Raises
    ModelError if the model cannot be loaded, has not two labels or no chat template.
    """

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        separator: str = "\n",
        reduce: Literal["min", "product", "mean", "last"] = "min",
        per: Literal["answer", "turn", "step"] = "turn",
        max_batch: int = 32,
        batch_tokens: int = 16_384,
        device: str = "cpu",
        dtype: Dtype = "float32",
    ) -> None:
        for name, value, known in (("reduce", reduce, [*_REDUCED]), ("per", per, ["answer", "turn", "step"])):
            if value not in known:
                remedy = f"choose one of {', '.join(known)}"
                raise ConfigError("unknown value", remedy, field=f"reward.options.{name}", value=value)
        if not separator:
            raise ConfigError("is empty", "leave it out", field="reward.options.separator", value=separator)
        super().__init__("Token", model, revision, device, dtype, max_batch, batch_tokens)
        self._separator, self._reduced, self._per = separator, _REDUCED[reduce], per

    def score_batch(self, calls: Sequence[tuple[Task, Transcript]]) -> list[RewardResult]:
        answers = [self._answers(transcript) for _, transcript in calls]
        limit = self._positions or math.inf
        fitting = [all(len(answer.row) <= limit for answer in each) for each in answers]
        rows = [answer.row for each, fits in zip(answers, fitting, strict=True) if fits for answer in each]
        outputs = iter(self._outputs(rows))
        return [
            self.result_of(each, [next(outputs)[answer.places].softmax(-1)[:, 1].tolist() for answer in each])
            if fits
            else RewardResult(None, reason=f"the answer is longer than the model's {limit} positions")
            for each, fits in zip(answers, fitting, strict=True)
        ]

    def result_of(self, answers: list[_Answer], values: list[list[float]]) -> RewardResult:
        """Return the reward of answers, whose steps have these values."""
        steps = [step for each in values for step in each]
        right = next((number for number, step in enumerate(steps) if step <= 0.5), len(steps))
        result = RewardResult(self._reduced(steps), {"steps": float(len(steps)), "right": float(right)})
        if self._per == "turn":
            return replace(result, turns=tuple(map(self._reduced, values)))
        if self._per == "step":
            ends = [(turn, end) for turn, answer in enumerate(answers) for end in answer.ends]
            pairs = zip(ends, steps, strict=True)
            return replace(result, steps=tuple(StepReward(turn, end, value) for (turn, end), value in pairs))
        return result

    def _answers(self, transcript: Transcript) -> list[_Answer]:
        said = [at for at, turn in enumerate(transcript.turns) if turn["role"] == "assistant"][transcript.given :]
        return [self._steps(transcript, at) for at in said]

    def _steps(self, transcript: Transcript, at: int) -> _Answer:
        answer = transcript.turns[at]["content"]
        read = _Answer(self._tokens(transcript.turns[:at], answering=True))
        closing, end = self._text(self._separator), 0
        for step in answer.split(self._separator):
            end = min(end + len(step) + len(self._separator), len(answer))
            if step.strip():
                read.add(self._text(step) + closing, end)
        if not read.ends:  # an answer without anything but separators is one step
            read.add(closing, len(answer))
        return read


@dataclass(frozen=True)
class _Answer:
    """The tokens of a conversation up to the end of an answer."""

    row: Tokens
    places: list[int] = field(default_factory=list)
    """Indices of the tokens whose outputs are those of the steps."""
    ends: list[int] = field(default_factory=list)
    """Characters of the answer up to the end of each step."""

    def add(self, step: Tokens, end: int) -> None:
        self.row.extend(step)
        self.places.append(len(self.row) - 1)
        self.ends.append(end)


def _refused(model: str, labels: int, problem: str) -> ModelError:
    what = "one output" if labels == 1 else f"{labels} labels for each token"
    remedy = f"give a classifier with {what} and a tokenizer with a chat template"
    return ModelError(problem, remedy, field="reward.options.model", value=model)
