"""Hugging Face models, by folder or hub id: where they are, and checks that need their config and tokenizer."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from rayrft.config.auxiliary import AuxiliaryConfig
from rayrft.config.explorer import EngineConfig
from rayrft.data.tokenizer import ChatTokenizer
from rayrft.errors import ModelError, first_line
from rayrft.registry import Lazy

transformers: Any = Lazy("transformers")


def find_model(path: str, field: str) -> str:
    """Return a model folder as an absolute path, or a hub id. Raises ModelError for ``field`` if neither exists."""
    if os.path.isdir(path):
        if (Path(path) / "config.json").is_file():
            return str(Path(path).absolute())
        problem = "the folder contains no model (no config.json)"
    else:
        try:
            transformers.AutoConfig.from_pretrained(path)
            return path
        except (OSError, ValueError) as error:
            problem = f"no such model: {first_line(error)}"
    remedy = "give a folder in Hugging Face format, or the id of a model on the hub, which the network or the cache has"
    raise ModelError(problem, remedy, field=field, value=path)


def has_weights(model: str) -> bool:
    """Return whether a model on the hub, whose config this node has, can be loaded here: the hub answers, or all its
    weights are cached."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import DryRunError

    try:
        snapshot_download(model, allow_patterns="config.json", dry_run=True)
        return True
    except DryRunError:
        folder = Path(str(try_to_load_from_cache(model, "config.json"))).parent
    found = {path.name for path in folder.glob("*") if path.suffix in (".safetensors", ".bin")}
    indexed = (json.loads(path.read_text())["weight_map"].values() for path in folder.glob("*.index.json"))
    return bool(found) and found.issuperset(chain.from_iterable(indexed))


def vocabulary_of(model: str) -> int:
    """Return the vocabulary size of the model's head."""
    return transformers.AutoConfig.from_pretrained(model).get_text_config().vocab_size


def attention_cost(model: str) -> float:
    """Return the cost of attention in training a row, per token squared: with s tokens the row costs as much as
    ``s + attention_cost s^2`` tokens without attention.

    A token's products with W weights, those of its experts and of the head included, take ``2 W`` operations forward.
    Causal attention takes ``2 A s^2`` for a row, with A the widths of all heads that attend to the whole row. Backward
    is twice as much of both (Kaplan et al. 2020, arXiv:2001.08361). So the cost is ``A / W``: 9.6e-5 for Qwen3-0.6B,
    whose rows of 10,000 tokens cost twice as much as their tokens.
    """
    text = transformers.AutoConfig.from_pretrained(model).get_text_config()
    hidden, layers = text.hidden_size, text.num_hidden_layers
    heads, shared, width = _heads(text)
    experts = getattr(text, "moe_intermediate_size", None) and text.num_experts_per_tok * text.moe_intermediate_size
    inner = experts or getattr(text, "intermediate_size", None) or 4 * hidden
    of_layer = 2 * width * (heads + shared) + 3 * inner
    weights = hidden * (layers * of_layer + text.vocab_size)
    return _layer_kinds(text).count("full_attention") * heads * width / weights


def _heads(text: Any) -> tuple[int, int, int]:
    """Return the numbers of a layer's heads of queries, and of keys, and the width of each."""
    heads = getattr(text, "num_attention_heads", None) or 0
    width = getattr(text, "head_dim", None) or text.hidden_size // max(heads, 1)
    return heads, getattr(text, "num_key_value_heads", None) or heads, width


def _layer_kinds(text: Any) -> list[str]:
    return getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers


def check_length(model: str, max_length: int, field: str) -> None:
    """Raise ModelError for ``field`` if the model has fewer positions: vLLM would refuse to start."""
    config = transformers.AutoConfig.from_pretrained(model).get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    scaled = {each.get("factor") or 1.0 for each in (rope, *rope.values()) if isinstance(each, dict)}
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and max_length > (most := int(positions * max(scaled, default=1.0))):
        remedy = f"lower it to at most {most}, or choose a model with more positions"
        raise ModelError(f"the model {model} has {most} positions", remedy, field=field, value=max_length)


def check_cache(model: str, max_length: int, dtype: str, engine: EngineConfig, field: str) -> None:
    """Raise ModelError for the ``field`` of an engine if its KV cache on a CPU has no room for a row of ``max_length``
    tokens: vLLM would refuse to start. Models of which a layer does not keep all tokens are not checked."""
    text = transformers.AutoConfig.from_pretrained(model).get_text_config()
    windows = {"full_attention"} != {*_layer_kinds(text)} or getattr(text, "sliding_window", None)
    if engine.gpus or windows or getattr(text, "kv_lora_rank", None):
        return
    _, heads, width = _heads(text)
    token = 2 * text.num_hidden_layers * heads * width * (4 if dtype == "float32" else 2)
    if engine.kv_cache_mib < (needed := math.ceil(token * max_length / 2**20)):
        problem = f"a row of {max_length:,} tokens takes {needed} MiB"
        remedy = f"raise it to {needed}, times the rows that an engine is to decode at once, or lower max_length"
        raise ModelError(problem, remedy, field=f"{field}.kv_cache_mib", value=engine.kv_cache_mib)


def check_auxiliary(auxiliary: Mapping[str, AuxiliaryConfig]) -> None:
    """Raise ModelError unless every auxiliary model exists, with its tokenizer and as many positions as it needs."""
    for name, config in auxiliary.items():
        field = f"auxiliary.{name}.model"
        ChatTokenizer(path := find_model(config.model, field), field, config.template)
        check_length(path, config.max_length, f"auxiliary.{name}.max_length")
        check_cache(path, config.max_length, config.dtype, config.engine, f"auxiliary.{name}.engine")


def check_teacher(path: str, field: str, tokenizer: ChatTokenizer, vocabulary: int) -> None:
    """Raise ModelError for ``field`` unless teacher and policy, of ``vocabulary`` tokens, share a tokenizer."""
    find_model(path, field)
    theirs, ours = ChatTokenizer(path, field).hf.get_vocab(), tokenizer.hf.get_vocab()
    different = next((token for token, index in ours.items() if theirs.get(token) != index), None)
    if different is not None:
        problem = f"the teacher's tokenizer is not the model's: token {different!r} has id {ours[different]} in the "
        problem += f"model's and {theirs.get(different)} in the teacher's"
        remedy = "choose a teacher of the same model family, with the same tokenizer"
        raise ModelError(problem, remedy, field=field, value=path)
    if (size := vocabulary_of(path)) < vocabulary:
        problem = f"the teacher has a vocabulary of {size}, and the model, of {vocabulary}, may sample tokens beyond it"
        raise ModelError(problem, "choose a teacher whose vocab_size is at least the model's", field=field, value=path)


def check_classifier(model: str, stage: str) -> None:
    """Raise ModelError unless transformers has a sequence classifier of the model's kind."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    kind = type(transformers.AutoConfig.from_pretrained(model))
    if kind not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        problem = f"transformers has no sequence classifier for it, which stage {stage!r} trains"
        remedy = "choose a model such as Llama, Qwen or Gemma, without images"
        raise ModelError(problem, remedy, field="model.path", value=kind.__name__)
