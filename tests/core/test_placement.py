"""The placement plan: what a run asks for, and the numbers in the error when it does not fit."""

from __future__ import annotations

import pytest

from rayrft.config import load_config
from rayrft.core.placement import check_placement, plan_placement, show_plan
from rayrft.errors import PlacementError
from tests.config.test_load import base

GIB = 1 << 30
LAPTOP = {"CPU": 2.0, "memory": 8.0 * GIB}


def test_the_quickstart_fits_two_cores() -> None:
    from tests.config.test_load import JOBS

    parts = plan_placement(load_config(JOBS / "quickstart.yaml"))
    check_placement(parts, LAPTOP, [LAPTOP])


def test_the_plan_names_every_group_and_the_totals() -> None:
    config = load_config(base(), {"explorer.engine.count": 3, "explorer.engine.cpus": 0.5})
    text = show_plan("a", plan_placement(config))
    for name in (
        "a:master",
        "a:explorer",
        "a:engines",
        "a:reward",
        "a:buffer",
        "a:weight_sync",
        "a:trainer",
        "a:ranks",
    ):
        assert name in text
    assert "vLLM rollout engines" in text and "broadcast over gloo" in text
    total = next(line for line in text.splitlines() if line.startswith("total"))
    assert "2.75" in total  # 3 x 0.5 engines, 2 x 0.35 ranks, 0.2 explorer, 0.1 reward and buffer, 3 x 0.05


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"explorer.engine.cpus": 4}, r"needs 9\.25 CPU and the cluster has 2 free"),
        ({"explorer.engine.memory_gib": 40}, r"needs 84\.15 GiB memory and the cluster has 8 GiB free"),
        ({"explorer.engine.gpus": 1, "trainer.gpus": 1}, r"needs 4 GPU and the cluster has 0 free"),
    ],
)
def test_what_does_not_fit_is_an_error_with_the_numbers(override: dict[str, float], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        check_placement(plan_placement(load_config(base(), override)), LAPTOP, [LAPTOP])


def test_a_bundle_that_no_single_node_can_hold_is_an_error() -> None:
    parts = plan_placement(load_config(base(), {"explorer.engine.count": 1, "explorer.engine.cpus": 3}))
    with pytest.raises(PlacementError, match="no single node can hold one bundle of 'engines'"):
        check_placement(parts, {"CPU": 8.0, "memory": 16.0 * GIB}, [LAPTOP] * 4)
