"""Images: where they stand among the tokens, and what a vision-language model of the Qwen-VL kind is given of them.

Records hold paths. In a sequence an image is a run of placeholder tokens, as many as the model makes of it; the patches
themselves are read from the file where they are needed.
"""

from __future__ import annotations

import contextlib
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayrft.errors import DataError, ModelError

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

MARK = "<image>"
"""Stands in a text where an image belongs."""

_CACHE_BYTES = 256 << 20


@dataclass(frozen=True)
class Patches:
    """An image as the model takes it: ``values`` ``[P, D]`` (float32) of P patches; ``grid`` ``[3]``, how many of them
    lie in time, height and width; and the number of tokens that stand for it."""

    values: Tensor
    grid: Tensor
    tokens: int


class ImageReader:
    """Reads images for one model. Raises ModelError where that takes none, or not in the way that is known here."""

    def __init__(self, model: str) -> None:
        from transformers import AutoConfig, AutoProcessor

        config = AutoConfig.from_pretrained(model)
        if not takes_images(model):
            raise ModelError(
                f"there are images to be looked at, but a model of type {config.model_type!r} takes none",
                field="model",
                value=model,
                remedy="give a model of the Qwen-VL family (or model.tiny.vision: true), or tasks without images",
            )
        try:
            self.processor: Any = AutoProcessor.from_pretrained(model)
        except (OSError, ValueError, ImportError) as error:
            raise ModelError(
                f"its image processor cannot be loaded: {str(error).strip().splitlines()[0]}",
                field="model",
                value=model,
                remedy="run cluster/setup.sh again (vision models need torchvision), and keep the model's "
                "preprocessor_config.json beside it",
            ) from None
        self.token_id: int = config.image_token_id
        self.merge: int = config.vision_config.spatial_merge_size
        """Patches on a side of the square that one token stands for."""
        self._read: OrderedDict[str, Patches] = OrderedDict()

    def picture(self, path: str) -> Image:
        """The image itself, as RGB. Raises DataError where there is none."""
        with _opened(path) as image:
            return image.convert("RGB")

    def read(self, path: str) -> Patches:
        """The image as the model takes it; those read last are kept."""
        if path in self._read:
            self._read.move_to_end(path)
            return self._read[path]
        self._read[path] = patches = self._patches(self.picture(path))
        while sum(each.values.nbytes for each in self._read.values()) > _CACHE_BYTES and len(self._read) > 1:
            self._read.popitem(last=False)
        return patches

    def blank(self) -> Patches:
        """A small image of nothing."""
        from PIL import Image

        return self._patches(Image.new("RGB", (8, 8)))

    def tokens(self, path: str) -> int:
        """How many tokens stand for the image. Raises DataError where there is none."""
        with _opened(path) as image:
            width, height = image.size
        return int(self.processor.image_processor.get_number_of_image_patches(height, width)) // self.merge**2

    def repeats(self, token_ids: list[int], images: tuple[str, ...]) -> list[int]:
        """How often each token must stand so that its image has room: 1, or the size of the image.

        ``token_ids`` hold one placeholder per image. Raises DataError where they do not.
        """
        found = token_ids.count(self.token_id)
        if found != len(images):
            raise DataError(f"the chat template left {found} places for {len(images)} images", field="images")
        sizes = iter([self.tokens(path) for path in images])
        return [next(sizes) if token == self.token_id else 1 for token in token_ids]

    def collapse(self, token_ids: list[int], images: tuple[str, ...]) -> list[int]:
        """The sequence with one placeholder per image; the opposite of repeating them."""
        left = list(token_ids)
        place = 0
        for path in images:
            place = left.index(self.token_id, place)
            del left[place + 1 : place + self.tokens(path)]
            place += 1
        return left

    def _patches(self, picture: Image) -> Patches:
        made = self.processor.image_processor(images=[picture], return_tensors="pt")
        grid = made["image_grid_thw"][0]
        return Patches(made["pixel_values"].float(), grid, int(grid.prod()) // self.merge**2)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Image]:
    from PIL import Image

    try:
        with Image.open(path) as image:
            yield image
    except OSError as error:  # also where the file holds no image, or half of one
        raise DataError(
            f"no image can be read: {error}",
            field="images",
            value=path,
            remedy="give paths of image files that every node finds",
        ) from None


def takes_images(model: str) -> bool:
    """Whether the model of that path or hub id takes images in the way of Qwen-VL: patches and a grid of them."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    return hasattr(config, "image_token_id") and hasattr(getattr(config, "vision_config", None), "spatial_merge_size")


def place(messages: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The messages in the form in which chat templates take images.

    Images stand where the users' texts have a `MARK`, in order; without any mark, before the first text of a user.
    Raises DataError where there are marks, but not one for each image.
    """
    marks = sum(each["content"].count(MARK) for each in messages if each["role"] == "user")
    if marks not in (0, count):
        raise DataError(f"there are {marks} marks {MARK} for {count} images", field="images")
    placed, before = [], 0 if marks else count
    for each in messages:
        if each["role"] != "user":
            placed.append(each)
            continue
        parts: list[dict[str, str]] = [{"type": "image"}] * before
        before = 0
        for piece in re.split(f"({re.escape(MARK)})", each["content"]):
            if piece:
                parts.append({"type": "image"} if piece == MARK else {"type": "text", "text": piece})
        placed.append({**each, "content": parts})
    return placed


def paths(values: Any, beside: Path) -> tuple[str, ...]:
    """A row's images as absolute paths; relative ones are from where the file ``beside`` lies, or in that folder.

    Raises DataError where one is no path, or nothing is there.
    """
    if values is None:
        return ()
    found = []
    for value in values if isinstance(values, list) else [values]:
        if not isinstance(value, str):
            raise DataError(f"an image is a {type(value).__name__}, not a path", remedy="save it, and give its path")
        path = ((beside if beside.is_dir() else beside.parent) / value).absolute()
        if not path.is_file():
            raise DataError(f"there is no image {path}", remedy="give paths from where the file lies that names them")
        found.append(str(path))
    return tuple(found)
