"""Generated image tasks for tests and demos: which colour is the square?"""

from __future__ import annotations

import numpy as np

from rayrft.config.tasks import TaskSourceConfig
from rayrft.errors import DataError
from rayrft.experience import Task

_COLOURS = {
    "red": (210, 40, 40),
    "green": (40, 170, 60),
    "blue": (40, 70, 210),
    "yellow": (225, 205, 50),
    "black": (25, 25, 25),
    "white": (235, 235, 235),
}
_SIDE, _SMALLEST, _LARGEST = 32, 12, 22
_SHADES = 20


def draw_squares(config: TaskSourceConfig, field: str) -> list[Task]:
    """Draw squares of random colour, shade, size and position on a background of another colour; the answer is the
    colour.

    The same pictures are written to ``config.path`` every time. Raises DataError if they cannot be written.
    """
    from PIL import Image

    assert config.path is not None and config.size is not None  # checked by the config
    folder = config.path.expanduser().absolute()
    rng = np.random.default_rng(0)
    tasks = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(config.size):
            path = folder / f"square-{number:05}.png"
            answer, pixels = _draw(rng)
            Image.fromarray(pixels).save(path)
            question = "Which colour is the square?"
            tasks.append(Task.create("squares", question, answer, images=(str(path),), system=config.system))
    except OSError as error:
        problem = f"cannot be drawn in: {error.strerror}"
        raise DataError(problem, "give another folder", field=f"{field}.path", value=str(folder)) from None
    return tasks


def _draw(rng: np.random.Generator) -> tuple[str, np.ndarray]:
    """Draw a picture; return the colour of the square, and the pixels ``[side, side, 3]``."""
    square, ground = rng.permutation(list(_COLOURS))[:2]
    shades = rng.integers(-_SHADES, _SHADES + 1, size=(2, 3))
    size = rng.integers(_SMALLEST, _LARGEST + 1)
    top, left = rng.integers(0, _SIDE - size + 1, size=2)
    pixels = np.empty((_SIDE, _SIDE, 3), dtype=np.uint8)
    pixels[:] = np.clip(_COLOURS[ground] + shades[0], 0, 255)
    pixels[top : top + size, left : left + size] = np.clip(_COLOURS[square] + shades[1], 0, 255)
    return str(square), pixels
