"""Operators that compare rows by a model's embeddings of their texts: the mean of its last hidden states, projected
to a few dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

import numpy as np
import pyarrow as pa
from pydantic import Field

from rayrft.config.base import Section, invalid, section_rule
from rayrft.errors import ConfigError, first_line
from rayrft.pipelines.operator import Applied, Context, Operator, TextColumn, register_operator
from rayrft.pipelines.operators.priorities import NumberOperator
from rayrft.pipelines.rows import gone, share_of, texts

_ROWS = 4096
"""Rows whose distances to others are computed at a time."""


class EmbeddingOptions(Section):
    """How an operator embeds texts, in its own process."""

    column: TextColumn = "question"
    model: str | None = None
    """A Hugging Face folder or hub id; by default the run's own model."""
    dimensions: int = Field(256, ge=2)
    """More are projected to so many at random, which keeps distances (Johnson and Lindenstrauss 1984): a row takes
    twice as many bytes."""
    max_tokens: int = Field(512, ge=1)
    """The rest of a longer text does not count."""
    batch: int = Field(16, ge=1)
    """Texts of about one length that are embedded at a time."""
    device: str = "auto"
    """``auto``: a GPU, if its process has one."""


class Embedder:
    """Embeds texts by the model of this path or hub id, which it loads. Raises ConfigError if there is none."""

    def __init__(self, options: EmbeddingOptions, path: str) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        self._options = options
        device = options.device
        self._device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path)
            self._model = AutoModel.from_pretrained(path).eval().to(self._device)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot be loaded: {first_line(error)}", field="model", value=path) from None
        size = self._model.config.get_text_config().hidden_size
        wanted = options.dimensions
        drawn = np.random.default_rng(0).standard_normal((size, wanted)) if size > wanted else None
        self._projection = None if drawn is None else (drawn / np.sqrt(wanted)).astype(np.float32)

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """Return a unit vector for each text, float16 ``[texts, dimensions]``, 0 for an empty one. It does not depend
        on the other texts but for rounding."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        limits = {"truncation": True, "max_length": self._options.max_tokens}
        ids = [torch.tensor(self._tokenizer(text, **limits)["input_ids"]) for text in texts]
        points = np.zeros((len(texts), self._model.config.get_text_config().hidden_size), np.float32)
        order = sorted((index for index in range(len(texts)) if len(ids[index])), key=lambda index: len(ids[index]))
        with torch.inference_mode():
            for start in range(0, len(order), self._options.batch):
                part = order[start : start + self._options.batch]
                tokens = pad_sequence([ids[index] for index in part], batch_first=True).to(self._device)
                mask = pad_sequence([torch.ones_like(ids[index]) for index in part], batch_first=True).to(self._device)
                states = self._model(input_ids=tokens, attention_mask=mask).last_hidden_state.float()
                points[part] = ((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)).cpu().numpy()
        return _unit(points if self._projection is None else points @ self._projection).astype(np.float16)


def _unit(points: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(points, axis=1, keepdims=True)
    return np.divide(points, lengths, out=np.zeros_like(points), where=lengths > 0)


def centred(points: np.ndarray) -> np.ndarray:
    """Return unit vectors of points relative to their mean, float16: hidden states of a language model all point
    nearly the same way, which hides how they differ (Ethayarajh 2019, arXiv:1909.00512)."""
    if not len(points):
        return points
    mean = np.mean(points, axis=0, dtype=np.float32)
    return np.concatenate([_unit(part.astype(np.float32) - mean).astype(np.float16) for part in _parts(points)])


def _parts(points: np.ndarray) -> list[np.ndarray]:
    return [points[start : start + _ROWS] for start in range(0, len(points), _ROWS)]


def similarities(points: np.ndarray, to: np.ndarray) -> np.ndarray:
    """Return the cosines of unit vectors ``[n, d]`` to others ``[m, d]``, float32 ``[n, m]``, in float32."""
    others = to.astype(np.float32).T
    parts = [part.astype(np.float32) @ others for part in _parts(points)]
    return np.concatenate(parts) if parts else np.empty((0, len(to)), np.float32)


def farthest(points: np.ndarray, count: int) -> np.ndarray:
    """Return the indices of ``count`` of n unit vectors, such that none of the others is far from all of them. The
    first is the vector nearest to the middle, each next one is farthest from those chosen (Gonzalez 1985). The largest
    distance is within twice the smallest possible. Work: ``n · count``."""
    if not count or not len(points):
        return np.empty(0, np.int64)
    middle = np.asarray(points.mean(axis=0, dtype=np.float32))[None]
    chosen = [int(np.argmax(similarities(points, middle)[:, 0]))]
    nearest = np.full(len(points), -np.inf, np.float32)
    while len(chosen) < min(count, len(points)):
        nearest = np.maximum(nearest, similarities(points, points[chosen[-1:]])[:, 0])
        nearest[chosen] = np.inf
        chosen.append(int(np.argmin(nearest)))
    return np.array(chosen)


def clustered(points: np.ndarray, count: int, clusters: int, rounds: int = 20) -> np.ndarray:
    """Return the indices of ``count`` unit vectors from all clusters: those nearest to their centres, in turn one of
    each cluster. Clusters are those of spherical k-means (Dhillon and Modha 2001), which begins with points that are
    far from each other, so that the same points give the same ones. Work: ``n · clusters · rounds``."""
    if not count or not len(points):
        return np.empty(0, np.int64)
    centres = points[farthest(points, clusters)].astype(np.float32)
    member = np.full(len(points), -1)
    for _ in range(rounds):
        near = [np.argmax(part.astype(np.float32) @ centres.T, axis=1) for part in _parts(points)]
        again = np.concatenate(near)
        if np.array_equal(again, member):
            break
        member = again
        sums = np.zeros_like(centres)
        np.add.at(sums, member, points.astype(np.float32))
        centres = _unit(sums)
    pairs = zip(_parts(points), _parts(member), strict=True)
    closeness = np.concatenate([(part.astype(np.float32) * centres[own]).sum(1) for part, own in pairs])
    order = np.lexsort((-closeness, member))
    starts = np.searchsorted(member[order], member[order])
    turn = np.empty(len(points), np.int64)
    turn[order] = np.arange(len(points)) - starts  # its place within its cluster
    return np.lexsort((-closeness, turn))[:count]


def nearest_other(points: np.ndarray) -> np.ndarray:
    """Return the cosine of each unit vector to the most similar other one, float32 ``[n]``; -1 for a single one. Work:
    ``n²``; memory: ``n`` times a few thousand bytes."""
    found = np.full(len(points), -1.0, np.float32)
    step = 512
    for start in range(0, len(points), step):
        part = similarities(points, points[start : start + step])  # [n, step]
        part[np.arange(start, start + part.shape[1]), np.arange(part.shape[1])] = -1
        found[start : start + step] = part.max(axis=0, initial=-1.0)
    return found


E = TypeVar("E", bound=EmbeddingOptions)


class _EmbeddingOperator(Operator[E]):
    """Sees the embeddings of all rows before it decides on any."""

    scope = "all"

    def __init__(self, options: E, context: Context) -> None:
        super().__init__(options, context)
        path = options.model or context.tokenizer
        if path is None:
            raise ConfigError("there is no model to embed with", "name one, or give --config", field="model")
        self._path = path
        self._points = list[np.ndarray]()

    def prepare(self) -> None:
        self._embed = Embedder(self.options, self._path)

    def observe(self, rows: pa.RecordBatch) -> None:
        self._points.append(self._embed(texts(rows, self.options.column)))

    def points(self) -> np.ndarray:
        """Return the embeddings of all rows, and forget them."""
        found = centred(np.concatenate(self._points or [np.empty((0, 1), np.float16)]))
        self._points.clear()
        return found


class DiverseOptions(EmbeddingOptions):
    share: float | None = Field(None, gt=0, le=1)
    """Share of the rows to keep, rounded up."""
    rows: int | None = Field(None, ge=1)
    """Or how many."""
    method: Literal["farthest", "clusters"] = "farthest"
    """``farthest``: each row is as far as can be from those before; outliers come first. ``clusters``: the rows nearest
    to the centres of clusters, as many of each cluster, as long as it has some; for large sets, as the work of
    ``farthest`` grows with the rows to keep."""
    clusters: int | None = Field(None, ge=1)
    """By default as many as rows are kept, but no more than 256."""

    @section_rule
    def _one_size(self) -> None:
        if (self.share is None) == (self.rows is None):
            raise invalid("share", "give either a share or a number of rows", value=self.share)
        if self.clusters is not None and self.method != "clusters":
            raise invalid("clusters", "are those of method: clusters", value=self.clusters)


@register_operator("diverse")
class Diverse(_EmbeddingOperator[DiverseOptions]):
    """Keep rows that are unlike each other, by a model's embeddings of a text. Memory: 512 bytes a row."""

    kind = "filter"

    def settle(self) -> None:
        options, points = self.options, self.points()
        count = min(options.rows or share_of(options.share or 1, len(points)), len(points))
        self._kept = np.zeros(len(points), bool)
        if options.method == "farthest":
            self._kept[farthest(points, count)] = True
        else:
            self._kept[clustered(points, count, options.clusters or min(count, 256))] = True

    def apply(self, rows: pa.RecordBatch) -> Applied:
        return Applied(rows, gone("similar row kept", self.take_next(self._kept, rows)))


@register_operator("embedding_novelty")
class EmbeddingNovelty(_EmbeddingOperator[EmbeddingOptions], NumberOperator[EmbeddingOptions]):
    """How far a text is from the most similar other one, by a model's embeddings: half of 1 minus their cosine, from 0
    to 1; none for an empty text. Work grows with the square of the rows: a minute or so for 1e5."""

    def settle(self) -> None:
        self._novelty = (1 - nearest_other(self.points())) / 2

    def values(self, rows: pa.RecordBatch) -> np.ndarray:
        values = self.take_next(self._novelty, rows).astype(np.float64)
        values[[not text.strip() for text in texts(rows, self.options.column)]] = np.nan
        return values
