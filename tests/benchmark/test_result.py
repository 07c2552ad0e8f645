"""The result of a bench as people and programs read it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rayrft.benchmark.result import BenchResult, BenchScore
from rayrft.explorer.evaluation import Attempt, measure


@pytest.fixture
def result(tmp_path: Path) -> BenchResult:
    """One model is right in half of four attempts, the other has no reward at all on the second task set."""
    half = [Attempt(str(t), r, float(r % 2), "ab"[r % 2], tokens=10, cut=r == 3) for t in range(5) for r in range(4)]
    lost = [Attempt("0", r, None, problem="timeout") for r in range(4)]
    scores = [("one", "words", half), ("two", "words", half), ("one", "sums", half), ("two", "sums", lost)]
    return BenchResult("b", tmp_path, tuple(BenchScore(m, t, measure(a, [1, 2, 4])) for m, t, a in scores))


def test_the_table_has_a_row_per_model_and_task_set(result: BenchResult) -> None:
    head, _, first, *_, last = result.table().splitlines()
    for column in ("mean@4", "pass@2", "pass@4", "maj@2", "maj@4", "tasks", "unknown", "tokens", "cut"):
        assert column in head.split()
    assert first.split()[:5] == ["one", "words", "0.500", "(0.170-0.830)", "0.833"]
    assert first.split()[5:7] == ["1.000", "(0.566-1.000)"]
    assert first.split()[-4:] == ["5", "0", "10", "25%"]
    assert last.split() == ["two", "sums", "-", "-", "-", "-", "-", "1", "4", "-", "-"]


def test_the_frame_has_every_measure_with_its_interval(result: BenchResult) -> None:
    frame = result.frame()
    assert len(frame) == 4 * (1 + 3 + 3)
    found = frame.query("model == 'one' and taskset == 'words' and measure == 'pass' and k == 4").iloc[0]
    assert (found.value, found.tasks) == (1.0, 5) and found.low < 1.0 <= found.high


def test_the_json_is_one_that_every_reader_takes(result: BenchResult) -> None:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    scores = json.loads(result.to_json(), parse_constant=refuse)["scores"]
    assert scores[3]["evaluation"]["accuracy"]["value"] is None and scores[3]["evaluation"]["unknown"] == {"timeout": 4}
    assert scores[0]["evaluation"]["passed"]["2"]["value"] == pytest.approx(5 / 6)


def test_the_plot_is_a_picture_also_where_a_model_has_no_reward(result: BenchResult, tmp_path: Path) -> None:
    result.save_plot(tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")
