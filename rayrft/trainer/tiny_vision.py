"""Tiny random vision-language models for tests and demos: Qwen2-VL architecture, tokenizer and processor."""

from __future__ import annotations

from pathlib import Path

import torch

from rayrft.config.model import TinyModelConfig
from rayrft.errors import ModelError
from rayrft.trainer.tiny import ASSISTANT, EOS, USER, make_tokenizer

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
_LARGEST = 64
"""Images with more than the square of this many pixels are scaled down: 16 tokens at most."""


def make_tiny_vision_model(
    config: TinyModelConfig, prompts: list[str], answers: list[str], folder: Path, *, max_length: int, seed: int
) -> None:
    """Write the model and its processor to ``folder``, in Hugging Face format: a token for every 16 x 16 pixels.

    Raises ModelError if torchvision is missing, which the processor needs.
    """
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = make_tokenizer(prompts, answers, special=[_START, _END, _IMAGE, _VIDEO], template=_TEMPLATE)
    _save_processor(tokenizer, folder)
    half = config.hidden_size // config.heads // 2  # rotary frequencies of a head, split over time, height and width
    torch.manual_seed(seed)
    model = Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(
            text_config={
                "vocab_size": len(tokenizer),
                "hidden_size": config.hidden_size,
                "intermediate_size": config.intermediate_size,
                "num_hidden_layers": config.layers,
                "num_attention_heads": config.heads,
                "num_key_value_heads": config.heads,
                "max_position_embeddings": max_length,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "mrope_section": [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8],
                },
                "eos_token_id": tokenizer.eos_token_id,
                "bos_token_id": None,
                "pad_token_id": tokenizer.pad_token_id,
            },
            vision_config={
                "depth": 2,
                "embed_dim": 64,
                "num_heads": 2,
                "mlp_ratio": 2,
                "hidden_size": config.hidden_size,
                "patch_size": _PATCH,
                "spatial_merge_size": _MERGE,
            },
            image_token_id=tokenizer.convert_tokens_to_ids(_IMAGE),
            video_token_id=tokenizer.convert_tokens_to_ids(_VIDEO),
            vision_start_token_id=tokenizer.convert_tokens_to_ids(_START),
            vision_end_token_id=tokenizer.convert_tokens_to_ids(_END),
            tie_word_embeddings=True,
        )
    )
    model.save_pretrained(folder)


def _save_processor(tokenizer, folder: Path) -> None:  # type: ignore[no-untyped-def]
    try:
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
        from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
        from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    except ImportError as error:
        remedy = "run cluster/setup.sh again: vision models need torchvision"
        raise ModelError(f"a vision model cannot be made: {error}", remedy, field="model.tiny.vision") from None
    size = {"shortest_edge": (_PATCH * _MERGE) ** 2, "longest_edge": _LARGEST**2}
    patches = {"patch_size": _PATCH, "merge_size": _MERGE, "size": size}
    processor = Qwen2VLProcessor(
        Qwen2VLImageProcessor(**patches),
        tokenizer,
        Qwen2VLVideoProcessor(**patches),
        chat_template=tokenizer.chat_template,
    )
    processor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
