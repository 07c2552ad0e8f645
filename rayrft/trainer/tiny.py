"""Tiny random models for tests and demos (Qwen3, or Qwen2-VL for images), and their tokenizer, built from the tasks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rayrft.config.model import TinyModelConfig
from rayrft.errors import ModelError

PAD, EOS, USER, ASSISTANT = "<|pad|>", "<|eos|>", "<|user|>", "<|assistant|>"
_START, _END, _IMAGE, _VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
_TEMPLATE = (
    "{% for message in messages %}"
    f"{{{{ '{ASSISTANT}' if message['role'] == 'assistant' else '{USER}' }}}}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    f"{{% if part['type'] == 'image' %}}{_START}{_IMAGE}{_END}{{% else %}}{{{{ part['text'] }}}}{{% endif %}}"
    "{% endfor %}{% endif %}"
    f"{{% if message['role'] == 'assistant' %}}{EOS}{{% endif %}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{ASSISTANT}{{% endif %}}"
)
_PATCH, _MERGE = 8, 2
_POSITIONS = 2048
"""Fewest positions: as a judge, the model reads more than as a policy. Positions are rotary and have no weights."""
_LARGEST = 64
"""Images with more than the square of this many pixels are scaled down: 16 tokens at most."""


def make_tiny_model(
    config: TinyModelConfig, prompts: list[str], answers: list[str], folder: Path, *, max_length: int, seed: int
) -> None:
    """Write a model with random weights and its tokenizer to ``folder``, in Hugging Face format; for images also its
    processor, with a token for every 16 x 16 pixels.

    Raises ModelError if torchvision is missing, which the processor needs.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = make_tokenizer(prompts, answers, special=[_START, _END, _IMAGE, _VIDEO] if config.vision else [])
    if config.vision:
        _save_processor(tokenizer, folder)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size}
    sizes |= {"vocab_size": len(tokenizer), "max_position_embeddings": max(max_length, _POSITIONS)}
    sizes |= {"num_attention_heads": config.heads, "num_key_value_heads": config.heads}
    sizes["num_hidden_layers"] = config.layers
    sizes |= {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    model = (_vision_model if config.vision else _text_model)(config, sizes, tokenizer)
    model.save_pretrained(folder)


def _text_model(config: TinyModelConfig, sizes: dict[str, Any], _: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    if config.experts:
        sizes |= {"num_experts": config.experts, "num_experts_per_tok": 2, "norm_topk_prob": True}
        sizes |= {"moe_intermediate_size": config.intermediate_size, "mlp_only_layers": [0]}
    kind = "qwen3_moe" if config.experts else "qwen3"
    head_dim = config.hidden_size // config.heads
    settings = AutoConfig.for_model(kind, head_dim=head_dim, tie_word_embeddings=True, **sizes)
    return AutoModelForCausalLM.from_config(settings)


def _vision_model(config: TinyModelConfig, sizes: dict[str, Any], tokenizer: Any) -> Any:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    half = config.hidden_size // config.heads // 2  # rotary frequencies of a head, split over time, height and width
    side = 3 * half // 8
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [half - 2 * side, side, side]}
    tower = {"depth": 2, "embed_dim": 64, "num_heads": 2, "mlp_ratio": 2, "hidden_size": config.hidden_size}
    tower |= {"patch_size": _PATCH, "spatial_merge_size": _MERGE}
    settings = Qwen2VLConfig(
        text_config={**sizes, "rope_parameters": rope},
        vision_config=tower,
        image_token_id=tokenizer.convert_tokens_to_ids(_IMAGE),
        video_token_id=tokenizer.convert_tokens_to_ids(_VIDEO),
        vision_start_token_id=tokenizer.convert_tokens_to_ids(_START),
        vision_end_token_id=tokenizer.convert_tokens_to_ids(_END),
        tie_word_embeddings=True,
    )
    return Qwen2VLForConditionalGeneration(settings)


def _save_processor(tokenizer: Any, folder: Path) -> None:
    try:
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
        from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
        from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    except ImportError as error:
        remedy = "run cluster/setup.sh again: vision models need torchvision"
        raise ModelError(f"a vision model cannot be made: {error}", remedy, field="model.tiny.vision") from None
    size = {"shortest_edge": (_PATCH * _MERGE) ** 2, "longest_edge": _LARGEST**2}
    patches = {"patch_size": _PATCH, "merge_size": _MERGE, "size": size}
    images, videos = Qwen2VLImageProcessor(**patches), Qwen2VLVideoProcessor(**patches)
    processor = Qwen2VLProcessor(images, tokenizer, videos, chat_template=tokenizer.chat_template)
    processor.save_pretrained(folder)


def make_tokenizer(
    prompts: list[str],
    answers: list[str],
    *,
    frequent: float = 0.5,
    special: Sequence[str] = (),
    template: str = _TEMPLATE,
) -> Any:
    """Build a tokenizer with tokens for the words that prompts share, and for single characters.

    A word is shared if at least the fraction ``frequent`` of the prompts contains it. Every character of prompts and
    answers has a token, so that decoding restores any such text.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    counts = Counter(word for prompt in prompts for word in set(re.findall(r"[A-Za-z]{2,}", prompt)))
    words = sorted(word for word, count in counts.items() if count >= frequent * len(prompts))
    characters = sorted(set("".join(prompts) + "".join(answers)) | set(map(chr, range(32, 127))) | {"\n"})
    tokens = [PAD, EOS, USER, ASSISTANT, *special, "<|unk|>", *characters, *words, *(f" {word}" for word in words)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
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
