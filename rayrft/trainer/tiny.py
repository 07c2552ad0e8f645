"""Tiny random models for tests and demos: Qwen3 architecture and a tokenizer built from the tasks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from rayrft.config.model import TinyModelConfig

PAD, EOS, USER, ASSISTANT = "<|pad|>", "<|eos|>", "<|user|>", "<|assistant|>"
_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|eos|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tiny_model(
    config: TinyModelConfig,
    prompts: list[str],
    answers: list[str],
    folder: Path,
    *,
    max_length: int,
    seed: int,
) -> None:
    """Write a model with random weights and its tokenizer to ``folder``, in Hugging Face format."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = make_tokenizer(prompts, answers)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    mixture = {
        "num_experts": config.experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": config.intermediate_size,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
    }
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "qwen3_moe" if config.experts else "qwen3",
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.heads,
            head_dim=config.hidden_size // config.heads,
            max_position_embeddings=max_length,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            pad_token_id=tokenizer.pad_token_id,
            **(mixture if config.experts else {}),
        )
    )
    model.save_pretrained(folder)


def make_tokenizer(  # type: ignore[no-untyped-def]
    prompts: list[str],
    answers: list[str],
    *,
    frequent: float = 0.5,
    special: Sequence[str] = (),
    template: str = _TEMPLATE,
):
    """Build a tokenizer with tokens for the words that prompts share, and for single characters.

    A word is shared if at least the fraction ``frequent`` of the prompts contains it. Every character of prompts and
    answers has a token, so that decoding restores any such text.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    counts = Counter(word for prompt in prompts for word in set(re.findall(r"[A-Za-z]{2,}", prompt)))
    words = sorted(word for word, count in counts.items() if count >= frequent * len(prompts))
    characters = sorted(set("".join(prompts) + "".join(answers)) | set(map(chr, range(32, 127))) | {"\n"})
    vocabulary = {
        token: index
        for index, token in enumerate(
            [PAD, EOS, USER, ASSISTANT, *special, "<|unk|>", *characters, *words, *(f" {word}" for word in words)]
        )
    }
    # A token of a shared word includes the space before it, which keeps prompts short.
    pattern = "|".join([rf" ?\b(?:{'|'.join(words)})\b"] * bool(words) + [r"[\s\S]"])
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=PAD,
        unk_token="<|unk|>",
        additional_special_tokens=[USER, ASSISTANT, *special],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
