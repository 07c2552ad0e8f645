"""An environment whose observations are pictures that it draws: which colour is the square?"""

from __future__ import annotations

import random

from PIL import Image

import rayrft

COLOURS = ["red", "green", "blue", "yellow"]


@rayrft.register_environment("painter")
class Painter:
    """Shows ``pictures`` squares one after the other; a right colour earns 1."""

    def __init__(self, pictures: int = 2) -> None:
        self._pictures = pictures

    def reset(self, task: rayrft.Task, seed: int) -> rayrft.Pictured:
        self._rng, self._steps = random.Random(seed), 0
        return self._draw()

    def step(self, action: str) -> rayrft.Step:
        self._steps += 1
        right = action.strip() == self._colour
        return rayrft.Step(self._draw(), reward=float(right), done=self._steps == self._pictures)

    def close(self) -> None:
        pass

    def _draw(self) -> rayrft.Pictured:
        self._colour = self._rng.choice(COLOURS)
        side = self._rng.choice([16, 32])
        return rayrft.Pictured("Which colour is the square?", (Image.new("RGB", (side, side), self._colour),))
