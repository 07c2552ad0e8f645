"""Images: their placeholder tokens, and their patches for vision-language models of the Qwen-VL family.

Records hold paths; an image that has none is written to a file (`keep_image`), but an image in a request of the
endpoint stays a data URL, which is erased with its record. In a sequence an image is a run of placeholder tokens, as
many as the model makes of it; patches are read when they are needed.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from rayrft.errors import DataError, ModelError, first_line
from rayrft.files import atomic_file
from rayrft.markup import DATA_URL

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

IMAGE_MARK = "<image>"
"""Marks the position of an image in a text."""
Picture = Union[str, Path, bytes, "Image"]
"""The path of an image, the bytes of its file, or what PIL has of it."""

_CACHE_BYTES = 256 << 20
_MOST_PIXELS = 1 << 26
"""Pixels of the largest image that is decoded, by the size in its header: 192 MiB in memory."""


@dataclass(frozen=True)
class Patches:
    """An image as model input: ``values`` ``[P, D]`` (float32) of P patches; ``grid`` ``[3]``, their number in time,
    height and width; and the number of placeholder tokens."""

    values: Tensor
    grid: Tensor
    tokens: int


class ImageReader:
    """Reads images for one model. Raises ModelError if the model takes none, or not in the way of Qwen-VL."""

    def __init__(self, model: str) -> None:
        from transformers import AutoConfig, AutoProcessor

        config = AutoConfig.from_pretrained(model)
        if not takes_images(model):
            problem = f"the data has images, but a model of type {config.model_type!r} takes none"
            remedy = "give a model of the Qwen-VL family (or model.tiny.vision: true), or tasks without images"
            raise ModelError(problem, remedy, field="model", value=model)
        try:
            self.processor: Any = AutoProcessor.from_pretrained(model)
        except (OSError, ValueError, ImportError) as error:
            remedy = "run cluster/setup.sh again (vision models need torchvision), and keep the model's "
            remedy += "preprocessor_config.json beside it"
            problem = f"its image processor cannot be loaded: {first_line(error)}"
            raise ModelError(problem, remedy, field="model", value=model) from None
        self.token_id: int = config.image_token_id
        self.merge: int = config.vision_config.spatial_merge_size
        """Side length, in patches, of the square that becomes one token."""
        self._cache: OrderedDict[str, Patches] = OrderedDict()

    def load(self, path: str) -> Image:
        """Load the image as RGB. Raises DataError if it cannot be read."""
        with _opened(path) as image:
            return image.convert("RGB")

    def read(self, path: str) -> Patches:
        """Read the image as model input, through an LRU cache. Raises DataError if it cannot be read."""
        if path in self._cache:
            self._cache.move_to_end(path)
            return self._cache[path]
        self._cache[path] = patches = self._patches(self.load(path))
        while sum(cached.values.nbytes for cached in self._cache.values()) > _CACHE_BYTES and len(self._cache) > 1:
            self._cache.popitem(last=False)
        return patches

    def blank(self) -> Patches:
        """Return a small black image."""
        from PIL import Image

        return self._patches(Image.new("RGB", (8, 8)))

    def tokens(self, path: str) -> int:
        """Return the number of placeholder tokens of the image. Raises DataError if it cannot be read."""
        with _opened(path) as image:
            width, height = image.size
        return int(self.processor.image_processor.get_number_of_image_patches(height, width)) // self.merge**2

    def repeats(self, token_ids: list[int], images: tuple[str, ...]) -> list[int]:
        """Return how often to repeat every token: an image's placeholder as often as it has tokens, others once.

        ``token_ids`` hold one placeholder per image. Raises DataError if they do not.
        """
        found = token_ids.count(self.token_id)
        if found != len(images):
            raise DataError(f"the chat template left {found} places for {len(images)} images", field="images")
        sizes = iter([self.tokens(path) for path in images])
        return [next(sizes) if token == self.token_id else 1 for token in token_ids]

    def collapse(self, token_ids: list[int], images: tuple[str, ...]) -> list[int]:
        """Reduce the placeholders of every image to one; the inverse of `repeats`."""
        collapsed = list(token_ids)
        index = 0
        for path in images:
            index = collapsed.index(self.token_id, index)
            del collapsed[index + 1 : index + self.tokens(path)]
            index += 1
        return collapsed

    def _patches(self, picture: Image) -> Patches:
        output = self.processor.image_processor(images=[picture], return_tensors="pt")
        grid = output["image_grid_thw"][0]
        return Patches(output["pixel_values"].float(), grid, int(grid.prod()) // self.merge**2)


def keep_image(image: Picture, folder: Path) -> str:
    """Return the path of an image: its own, or that of a file in ``folder``, named by the digest of what it holds.

    Equal images are one file, which appears whole or not at all. Raises DataError if bytes are not an image.
    """
    if isinstance(image, str | Path):
        return str(image)
    if not isinstance(image, bytes):
        drawn = io.BytesIO()
        image.convert("RGB").save(drawn, "PNG")
        image = drawn.getvalue()
    with _opened(io.BytesIO(image)) as opened:
        kind = str(opened.format).lower()
    path = folder / f"{hashlib.blake2b(image, digest_size=16).hexdigest()}.{kind}"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(path, shared=True) as partial:
            partial.write_bytes(image)
    return str(path)


@contextlib.contextmanager
def _opened(file: str | io.BytesIO) -> Iterator[Image]:
    """Open an image, whose pixels are decoded when they are used. Raises DataError, also for what is raised inside."""
    from PIL import Image

    url = DATA_URL.match(file) if isinstance(file, str) else None
    value = url[0] if url else file if isinstance(file, str) else f"{file.getbuffer().nbytes} bytes"
    remedy = "give PNG or JPEG files that every node can read, or their bytes"
    try:
        if url is not None:
            file = io.BytesIO(base64.b64decode(str(file)[url.end() :], validate=True))
        with Image.open(file) as image:
            if image.width * image.height > _MOST_PIXELS:
                raise Image.DecompressionBombError(f"{image.width} x {image.height} pixels")
            yield image
    except Image.DecompressionBombError as error:
        problem = f"an image has more than {_MOST_PIXELS} pixels: {error}"
        raise DataError(problem, "scale it down", field="images", value=value) from None
    except (OSError, SyntaxError, ValueError) as error:  # also raised for a file that is not an image, or is truncated
        raise DataError(f"no image can be read: {error}", remedy, field="images", value=value) from None


def takes_images(model: str) -> bool:
    """Return whether the model of this path or hub id takes images as Qwen-VL does: patches and their grid."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    return hasattr(config, "image_token_id") and hasattr(getattr(config, "vision_config", None), "spatial_merge_size")


def insert_images(messages: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Convert messages to the multi-part form in which chat templates take images.

    Images replace the `IMAGE_MARK`s in the users' texts, in order; without marks they precede the first user text.
    Raises DataError if the number of marks is neither 0 nor the number of images.
    """
    marks = sum(message["content"].count(IMAGE_MARK) for message in messages if message["role"] == "user")
    if marks not in (0, count):
        raise DataError(f"there are {marks} marks {IMAGE_MARK} for {count} images", field="images")
    converted, before = [], 0 if marks else count
    for message in messages:
        if message["role"] != "user":
            converted.append(message)
            continue
        parts: list[dict[str, str]] = [{"type": "image"}] * before
        before = 0
        for piece in re.split(f"({re.escape(IMAGE_MARK)})", message["content"]):
            if piece:
                parts.append({"type": "image"} if piece == IMAGE_MARK else {"type": "text", "text": piece})
        converted.append({**message, "content": parts})
    return converted


def image_paths(values: list[Any], base: Path, keep: Path | None = None) -> tuple[str, ...]:
    """Return a row's images as absolute paths; relative ones are relative to the folder ``base``, or that of the file.

    Pictures of PIL, and bytes, also in the form of the hub's data sets (``{"bytes": …, "path": …}``), are kept in the
    folder ``keep``. Raises DataError if a value is not an image, the file does not exist, or ``keep`` is missing.
    """
    paths = []
    for value in values:
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        picture = isinstance(value, bytes) or hasattr(value, "convert")
        if picture and keep is not None:
            value = keep_image(value, keep)
        if not isinstance(value, str):
            remedy = "name 'images_folder'" if picture else "give its path"
            raise DataError(f"an image is {type(value).__name__}, not a path", remedy)
        path = ((base if base.is_dir() else base.parent) / value).absolute()
        if not os.path.isfile(path):  # unlike `Path.is_file`, False also for what is too long to be a path
            raise DataError(f"there is no image {str(path)[:200]}", "give paths relative to the file that names them")
        paths.append(str(path))
    return tuple(paths)
