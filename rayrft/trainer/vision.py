"""Images in a padded micro-batch, as models of the Qwen-VL kind take them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rayrft.data.images import ImageReader
from rayrft.errors import ModelError

_AS_TEXT = "as_text"


def with_images(padded: Tensor, images: tuple[tuple[str, ...], ...], reader: ImageReader) -> dict[str, Any]:
    """A model's inputs for rows of tokens ``[N, W]`` and the images of each.

    The first placeholders of a row, as many as its images take, are its images. A model may also say a placeholder:
    that is a token like any other, both where it was sampled and here. Below rows without any image goes one of a blank
    image, which changes no loss: every rank must run the same layers, whatever rows it has.
    """
    read = [[reader.read(path) for path in each] for each in images or [()] * len(padded)]
    if not any(read):
        blank = reader.blank()
        width = max(padded.shape[1], blank.tokens)
        rows = padded.new_zeros(len(padded) + 1, width)
        rows[:-1, : padded.shape[1]] = padded
        rows[-1, : blank.tokens] = reader.token_id
        padded, read = rows, [*read, [blank]]
    room = torch.tensor([sum(each.tokens for each in row) for row in read], device=padded.device)
    same = padded == reader.token_id
    placeholder = same & (same.cumsum(1) <= room[:, None])
    return {
        "input_ids": padded.masked_fill(same & ~placeholder, 0),
        "mm_token_type_ids": placeholder.int(),
        "pixel_values": torch.cat([each.values for row in read for each in row]).to(padded.device),
        "image_grid_thw": torch.stack([each.grid for row in read for each in row]).to(padded.device),
        _AS_TEXT: (same & ~placeholder, reader.token_id),
    }


def run(model: Any, inputs: dict[str, Any]) -> Any:
    """The model's output for what `with_images` (or nothing of the kind) gave."""
    inputs = dict(inputs)
    with _embedded(model, *inputs.pop(_AS_TEXT, (None, 0))):
        return model(**inputs, use_cache=False)


def refuse(images: tuple[tuple[str, ...], ...]) -> None:
    """Raises ModelError where rows have images that the model cannot be shown."""
    if seen := next((path for each in images for path in each), None):
        raise ModelError(
            "a row has an image, but the model takes none",
            field="model",
            value=seen,
            remedy="give a model of the Qwen-VL family, or rows without images",
        )


@contextlib.contextmanager
def _embedded(model: Any, where: Tensor | None, token: int) -> Iterator[None]:
    """Within, the places ``where`` (``[N, W]``) are embedded as that token."""
    if where is None or not where.any():
        yield
        return

    def replace(module: Any, _: Any, out: Tensor) -> Tensor:
        return torch.where(where[..., None], module.weight[token], out)

    handle = model.get_input_embeddings().register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()
