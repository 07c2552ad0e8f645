"""Inputs of vision-language models of the Qwen-VL family for a padded micro-batch."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from rayrft.data.images import ImageReader

_TEXT_PLACEHOLDERS = "text_placeholders"


def with_images(padded: Tensor, images: tuple[tuple[str, ...], ...], reader: ImageReader) -> dict[str, Any]:
    """Return a model's inputs for rows of tokens ``[N, W]`` and their image paths.

    A row's first placeholder tokens, as many as its images take, are its images. A model may also sample a placeholder
    token: that one is embedded as text, as the engine did. If no row has an image, a row with a blank image is added,
    which changes no loss: every rank must run the same layers.
    """
    pictures = [[reader.read(path) for path in paths] for paths in images or [()] * len(padded)]
    if not any(pictures):
        blank = reader.blank()
        width = max(padded.shape[1], blank.tokens)
        rows = padded.new_zeros(len(padded) + 1, width)
        rows[:-1, : padded.shape[1]] = padded
        rows[-1, : blank.tokens] = reader.token_id
        padded, pictures = rows, [*pictures, [blank]]
    image_tokens = torch.tensor([sum(image.tokens for image in row) for row in pictures], device=padded.device)
    same = padded == reader.token_id
    placeholder = same & (same.cumsum(1) <= image_tokens[:, None])
    return {
        "input_ids": padded.masked_fill(same & ~placeholder, 0),
        "mm_token_type_ids": placeholder.int(),
        "pixel_values": torch.cat([image.values for row in pictures for image in row]).to(padded.device),
        "image_grid_thw": torch.stack([image.grid for row in pictures for image in row]).to(padded.device),
        _TEXT_PLACEHOLDERS: (same & ~placeholder, reader.token_id),
    }


def run_model(model: Any, inputs: dict[str, Any]) -> Any:
    """Run the model on inputs for text, or on those that `with_images` returns."""
    inputs = dict(inputs)
    where, token = inputs.pop(_TEXT_PLACEHOLDERS, (None, 0))

    def embed(module: Any, _: Any, out: Tensor) -> Tensor:
        return torch.where(where[..., None], module.weight[token], out)

    embedding = model.get_input_embeddings()
    with contextlib.nullcontext() if where is None else embedding.register_forward_hook(embed):
        return model(**inputs, use_cache=False)
