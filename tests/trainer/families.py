"""Shapes of models: small ones of each family, and those of large ones without weights."""

from __future__ import annotations

from typing import Any

from transformers import Gemma3TextConfig, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

SMALL: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, PreTrainedConfig] = {
    "qwen3, tied": Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SMALL),
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "gemma3": Gemma3TextConfig(**SMALL, head_dim=8),
    "qwen3 moe": Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=8),
}


def large(kind: Any, vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, **settings: Any) -> Any:
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": intermediate}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128}
    return kind(**sizes, **settings)


SHAPES = {
    "qwen3 0.6B": large(Qwen3Config, 151936, 1024, 3072, 28, 16, tie_word_embeddings=True),
    "qwen3 8B": large(Qwen3Config, 151936, 4096, 12288, 36, 32, tie_word_embeddings=False),
    "qwen3 32B": large(Qwen3Config, 151936, 5120, 25600, 64, 64, tie_word_embeddings=False),
    "llama 70B": large(LlamaConfig, 128256, 8192, 28672, 80, 64),
}
