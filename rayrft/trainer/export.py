"""Export of a checkpoint as a folder for transformers, vLLM or peft; on the CPU, without Ray."""

from __future__ import annotations

from pathlib import Path

import torch

from rayrft.config import RunConfig
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.trainer.dcp import load_weights, read_base
from rayrft.trainer.lora import Lora
from rayrft.trainer.model import load_policy, write_adapter, write_hf
from rayrft.trainer.reward_model import RewardClassifier, padding_of


def export_checkpoint(
    config: RunConfig, model: str, checkpoint: Path, to: Path, *, reward_model: bool, merged: bool
) -> None:
    """Write the language model of a checkpoint, or its ``reward_model`` (a sequence classifier), to the folder ``to``.

    ``model`` is the run's original model. An adapter is ``merged`` into the weights, or written in peft format.
    """
    lora, tokenizer = config.trainer.lora, ChatTokenizer(model, template=config.model.template)
    base = (lora is not None and read_base(checkpoint)) or model
    policy = load_policy(base)
    if lora is not None:
        policy.lora = Lora(policy.model, lora, origin=base, compute=torch.float32, seed=config.seed)
    trained = RewardClassifier(policy, padding_of(model)) if reward_model else policy
    load_weights(checkpoint, trained)
    if merged or reward_model:
        write_hf(trained, trained.state_dict(), tokenizer, to)
    else:
        write_adapter(policy, base, tokenizer, to)
