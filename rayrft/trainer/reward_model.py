"""The reward model that a stage trains: a sequence classifier of transformers with one output."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from rayrft.errors import ModelError, first_line
from rayrft.trainer.batches import MicroBatch
from rayrft.trainer.loading import reshard
from rayrft.trainer.lora import checkpoint_name
from rayrft.trainer.policy import Policy
from rayrft.trainer.value_model import ScalarHead, last_tokens


class RewardClassifier(ScalarHead):
    """Scores rows as `AutoModelForSequenceClassification` does: by the state after the last token that is not padding.

    ``padding`` is the id of the token that pads; without one it is the state after the last token. Raises ModelError if
    transformers has no classifier of the model's kind.
    """

    def __init__(self, policy: Policy, padding: int | None) -> None:
        super().__init__(policy)
        self._padding = padding
        self._classifier = [_classifier(policy.model.config, padding)]  # in a list: it is not a submodule
        found = {name for name in self.named_as_in_files(self.state_dict()) if ".lora_" not in name}
        expected = set(self.transformer.state_dict())
        if different := sorted(found ^ expected):
            raise _no_classifier(policy.model.config, f"{different[0]} is not a weight of both")

    def forward(self, batch: MicroBatch) -> Tensor:
        """Compute the score of every row, ``[N]``, with gradient."""
        return self.outputs(batch, last_tokens(batch, self._padding))

    @torch.no_grad()
    def copy_decoder(self, policy: Policy) -> None:
        """Take over the trained weights of a policy that is sharded likewise. With an adapter there are none: a stage
        begins with a new one."""
        reshard(policy)
        if self.lora is not None:
            return
        theirs = dict(policy.model.base_model.named_parameters())
        for name, parameter in self.model.named_parameters():
            parameter.copy_(theirs[name])

    @property
    def transformer(self) -> Any:
        """The classifier that is written to files, without weights."""
        return self._classifier[0]

    def named_as_in_files(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return this module's parameters by their names in the classifier's files."""
        prefix = self.transformer.base_model_prefix
        names = {name: checkpoint_name(f"{prefix}.{name.removeprefix('model.')}") for name in state}
        return {names[name] if name != "head.weight" else "score.weight": tensor for name, tensor in state.items()}


def padding_of(tokenizer: str) -> int | None:
    """Return the id of the token with which a tokenizer pads, if it has one."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer).pad_token_id


def _classifier(config: Any, padding: int | None) -> Any:
    """Return the classifier of a model's configuration, without weights."""
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(config)
    config.num_labels, config.pad_token_id = 1, padding
    try:
        with torch.device("meta"):
            return AutoModelForSequenceClassification.from_config(config)
    except ValueError as error:
        raise _no_classifier(config, first_line(error)) from None


def _no_classifier(config: Any, problem: str) -> ModelError:
    problem = f"transformers has no sequence classifier for it: {problem}"
    remedy = "train a reward model from a model such as Llama, Qwen or Gemma, without images"
    return ModelError(problem, remedy, field="model.path", value=type(config).__name__)
