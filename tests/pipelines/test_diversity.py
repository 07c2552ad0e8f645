"""Rows by embeddings: those unlike each other are kept, and those unlike all others come first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayrft.errors import ConfigError
from rayrft.pipelines import Context
from rayrft.pipelines.operators.diversity import Embedder, EmbeddingOptions, centred, clustered, farthest, nearest_other
from tests.errors import about
from tests.pipelines.small import applied, linked, operator, reasons, rows


def around(*angles: float, each: int, spread: float = 1.0) -> np.ndarray:
    """Unit vectors in the plane, ``each`` around each angle, within ``spread`` degrees."""
    rng = np.random.default_rng(0)
    degrees = np.repeat(angles, each) + rng.uniform(-spread, spread, each * len(angles))
    radians = np.deg2rad(degrees)
    return np.stack([np.cos(radians), np.sin(radians)], axis=1).astype(np.float16)


@pytest.mark.parametrize("method", [farthest, lambda points, count: clustered(points, count, 4)])
def test_as_many_rows_as_there_are_heaps_are_one_of_each(method: Any) -> None:
    points = around(0, 90, 180, 270, each=2000)
    assert sorted(method(points, 4) // 2000) == [0, 1, 2, 3]
    twelve = method(points, 12)
    assert len(set(twelve.tolist())) == 12
    assert len(method(points[:5], 12)) == 5 and len(method(points, 0)) == 0 and len(method(points[:0], 3)) == 0


def test_the_farthest_points_leave_none_far_from_all_of_them() -> None:
    rng = np.random.default_rng(1)
    points = rng.standard_normal((5000, 8))
    points = (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float16)
    chosen = farthest(points, 200)

    def cover(indices: np.ndarray) -> float:
        return float(np.max(points.astype(np.float32) @ points[indices].astype(np.float32).T, axis=1).min())

    assert cover(chosen) > cover(rng.choice(5000, 200, replace=False))
    between = points[chosen].astype(np.float32) @ points[chosen].astype(np.float32).T
    np.fill_diagonal(between, -1)
    assert between.max() <= cover(chosen) + 2e-3, "no two of them are nearer than the radius of what they cover"


def test_of_clusters_the_middle_is_taken_and_of_small_ones_all_there_is() -> None:
    points = np.concatenate([around(0, each=500, spread=20), around(180, each=3, spread=1)])
    chosen = clustered(points, 20, 2)
    assert sorted(chosen[:2] // 500) == [0, 1] and {500, 501, 502} <= set(chosen.tolist())
    taken = np.rad2deg(np.arctan2(*points[chosen[chosen < 500]].astype(float).T[::-1]))
    assert np.abs(taken).max() < 5


def test_novelty_is_the_distance_to_the_most_similar_other_one() -> None:
    points = np.concatenate([around(0, each=600, spread=0), around(60, each=1, spread=0)])
    nearest = nearest_other(points)
    assert nearest[:600] == pytest.approx(1, abs=1e-3) and nearest[600] == pytest.approx(0.5, abs=1e-3)
    assert nearest_other(points[:1]).tolist() == [-1.0]


def test_embeddings_do_not_depend_on_who_is_beside_whom(tiny_model: Path) -> None:
    texts = ["Spell this word backward: cat", "", "horse", "a", "Spell this word backward: cat", "bird " * 50]
    for dimensions in (256, 8):
        embed = Embedder(EmbeddingOptions(batch=3, dimensions=dimensions), str(tiny_model))
        together, alone = embed(texts), np.concatenate([embed([text]) for text in texts])
        assert together.dtype == np.float16 and together.shape == (6, min(dimensions, 64))
        assert together == pytest.approx(alone, abs=2e-3)
        lengths = np.linalg.norm(together.astype(np.float32), axis=1)
        assert lengths == pytest.approx([1, 0, 1, 1, 1, 1], abs=1e-2)
    assert together[0] == pytest.approx(together[4], abs=2e-3) and not np.allclose(together[0], together[2], atol=0.1)
    assert centred(together[:0]).shape == (0, 8)


def test_rows_like_others_are_left_out_and_those_unlike_others_come_first(tiny_model: Path) -> None:
    given = ["Spell this word backward: cat"] * 6 + ["horse", "zz 9"]
    options = {"model": str(tiny_model), "column": "text"}
    for more in ({"rows": 3}, {"share": 0.375, "method": "clusters"}):
        found, outcome = applied("diverse", rows(text=given), **options, **more)
        assert sorted({row["text"] for row in found}) == sorted(set(given)) and len(found) == 3
        assert set(reasons(outcome)) == {"similar row kept"}
    found, _ = applied("embedding_novelty", rows(text=[*given, " "]), **options)
    priorities = [row["priority"] for row in found]
    assert priorities[:6] == pytest.approx([0] * 6, abs=1e-3) and min(priorities[6:8]) > 0.1 and priorities[8] is None


def test_options_that_do_not_fit_are_refused() -> None:
    for options, field in (
        ({"rows": 3}, "operators.0.model"),
        ({"model": "m"}, "operators.0.share"),
        ({"model": "m", "rows": 3, "share": 0.5}, "operators.0.share"),
        ({"model": "m", "rows": 3, "clusters": 2}, "operators.0.clusters"),
        ({"model": "m", "rows": 3, "column": "other"}, "operators.0.diverse"),
    ):
        with pytest.raises(ConfigError, check=about(field)):
            linked(rows(question=["q"]), operator("diverse", **options))
    assert linked(rows(question=["q"]), operator("diverse", rows=1), context=Context((), "model"))
