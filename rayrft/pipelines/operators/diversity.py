"""Operators that compare rows by a model's embeddings of their texts."""

from __future__ import annotations

from typing import Literal, TypeVar

import numpy as np
import pyarrow as pa
from pydantic import Field

from rayrft.config.base import invalid, section_rule
from rayrft.errors import ConfigError
from rayrft.pipelines.operator import Applied, Context, Operator, register_operator
from rayrft.pipelines.operators import embeddings
from rayrft.pipelines.operators.embeddings import EmbeddingOptions
from rayrft.pipelines.operators.priorities import NumberOperator
from rayrft.pipelines.rows import gone, share_of, texts

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
        self._embed = embeddings.Embedder(self.options, self._path)

    def observe(self, rows: pa.RecordBatch) -> None:
        self._points.append(self._embed(texts(rows, self.options.column)))

    def points(self) -> np.ndarray:
        """Return the embeddings of all rows, and forget them."""
        found = embeddings.centred(np.concatenate(self._points or [np.empty((0, 1), np.float16)]))
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
            self._kept[embeddings.farthest(points, count)] = True
        else:
            self._kept[embeddings.clustered(points, count, options.clusters or min(count, 256))] = True

    def apply(self, rows: pa.RecordBatch) -> Applied:
        return Applied(rows, gone("similar row kept", self.take_next(self._kept, rows)))


@register_operator("embedding_novelty")
class EmbeddingNovelty(_EmbeddingOperator[EmbeddingOptions], NumberOperator[EmbeddingOptions]):
    """How far a text is from the most similar other one, by a model's embeddings: half of 1 minus their cosine, from 0
    to 1; none for an empty text. Work grows with the square of the rows: a minute or so for 1e5."""

    def settle(self) -> None:
        self._novelty = (1 - embeddings.nearest_other(self.points())) / 2

    def values(self, rows: pa.RecordBatch) -> np.ndarray:
        values = self.take_next(self._novelty, rows).astype(np.float64)
        values[[not text.strip() for text in texts(rows, self.options.column)]] = np.nan
        return values
