"""The placement plan: what a run asks for, and the numbers in the error when it does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from rayrft.config import load_config
from rayrft.core.parts.table import plan_placement
from rayrft.core.placement import Bundles, Placement, check_placement, show_plan
from rayrft.errors import PlacementError
from tests.config.given import base

GIB = 1 << 30
LAPTOP = {"CPU": 2.0, "memory": 8.0 * GIB}


def test_the_quickstart_fits_two_cores() -> None:
    from tests.conftest import ROOT

    parts = plan_placement(load_config(ROOT / "jobs" / "quickstart.yaml"))
    check_placement(parts, [LAPTOP])


def test_the_plan_names_every_group_and_the_totals() -> None:
    config = load_config(base(), {"explorer.engine.count": 3, "explorer.engine.cpus": 0.5, "reward.placement": "pool"})
    text = show_plan("a", plan_placement(config))
    for name in ("master", "explorer", "engines", "reward", "buffer", "engine_pool", "trainer", "ranks"):
        assert f"a:{name}" in text
    assert "vLLM rollout engines, weights over gloo" in text
    total = next(line for line in text.splitlines() if line.startswith("total"))
    assert "2.75" in total  # 3 x 0.5 engines, 2 x 0.35 ranks, 0.2 explorer, 0.1 reward and buffer, 3 x 0.05


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"explorer.engine.cpus": 4}, r"needs 9\.15 CPU and the cluster has 2 free"),
        ({"explorer.engine.memory_gib": 40}, r"needs 84 GiB memory and the cluster has 8 GiB free"),
        ({"explorer.engine.gpus": 1, "trainer.gpus": 1}, r"needs 4 GPU and the cluster has 0 free"),
    ],
)
def test_what_does_not_fit_is_an_error_with_the_numbers(override: dict[str, float], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        check_placement(plan_placement(load_config(base(), override)), [LAPTOP])


def test_a_bundle_that_no_single_node_can_hold_is_an_error() -> None:
    parts = plan_placement(load_config(base(), {"explorer.engine.count": 1, "explorer.engine.cpus": 3}))
    with pytest.raises(PlacementError) as refused:
        check_placement(parts, [LAPTOP] * 4)
    assert refused.value.field == "placement.engines"


def part(name: str, count: int, cpus: float = 0.1, gpus: float = 0.0) -> Bundles:
    return Bundles(name, count, cpus, gpus, 0.1, "")


@pytest.mark.parametrize(
    ("parts", "nodes", "left_over"),
    [
        ([part("a", 2, cpus=1.2), part("b", 1, cpus=0.9)], [LAPTOP] * 2, "b"),  # 0.8 CPU is left on either node
        ([part("a", 2, cpus=1.2), part("b", 2, cpus=0.8)], [LAPTOP] * 2, None),
        ([part("a", 1, gpus=2)], [{**LAPTOP, "GPU": 1.0}] * 2, "a"),
        ([part("a", 4, gpus=0.6), part("b", 2, gpus=0.5)], [{**LAPTOP, "GPU": 4.0}], "b"),  # 0.4 on every GPU
        ([part("a", 4, gpus=0.4), part("b", 4, gpus=0.6)], [{**LAPTOP, "GPU": 4.0}], "b"),  # two of "a" share a GPU
        ([part("a", 4, gpus=0.4), part("b", 2, gpus=1)], [{**LAPTOP, "GPU": 4.0}], None),
        ([part("a", 4, gpus=0.6), part("b", 4, gpus=0.4)], [{**LAPTOP, "GPU": 4.0}], None),
        ([part("a", 1, gpus=0.4), part("b", 1, gpus=0.5)], [{**LAPTOP, "GPU": 0.9}], None),  # of a GPU in use
        ([part("a", 2, gpus=0.6)], [{**LAPTOP, "GPU": 1.7}], None),
        ([part("a", 2, gpus=0.8)], [{**LAPTOP, "GPU": 1.7}], "a"),
    ],
)
def test_what_is_enough_in_sum_and_fits_nowhere_is_refused_by_name(
    parts: list[Bundles], nodes: list[dict[str, float]], left_over: str | None
) -> None:
    if left_over is None:
        check_placement(parts, nodes)
    else:
        with pytest.raises(PlacementError) as refused:
            check_placement(parts, nodes)
        assert refused.value.field == f"placement.{left_over}"


SHARED = {"explorer.engine.gpus": 0.3, "trainer.gpus": 0.4, "explorer.engine.cpus": 0.1, "trainer.cpus": 0.2}


def test_engines_and_ranks_that_share_gpus_share_their_bundles() -> None:
    config = load_config(base(), {**SHARED, "explorer.engine.count": 2, "trainer.ranks": 2})
    parts = {part.name: part for part in plan_placement(config)}
    assert "ranks" not in parts and parts["engines"].count == 2
    assert parts["engines"].bundle == {"CPU": 0.3, "GPU": 0.7, "memory": 3.0 * GIB}
    assert "a:ranks" in show_plan("a", list(parts.values()))


def test_each_engine_is_on_the_gpu_of_its_rank_and_of_no_other(ray_cluster: Any) -> None:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    if ray.cluster_resources().get("GPU", 0) < 2:
        pytest.skip("needs 2 GPUs, or what Ray takes for them")
    config = load_config(base(), {**SHARED, "explorer.engine.count": 2, "trainer.ranks": 2})
    parts = plan_placement(config)
    placement = Placement("pairs", parts)
    placement.reserve([part.name for part in parts if part.name in ("engines", "ranks")])
    try:
        engines = [placement.actor(Device, "engines", bundle=index).create() for index in range(2)]
        device = ray.remote(num_cpus=config.trainer.cpus, num_gpus=config.trainer.gpus)(Device)
        bundles = [PlacementGroupSchedulingStrategy(placement.ranks, index) for index in range(2)]
        ranks = [device.options(scheduling_strategy=bundle).remote() for bundle in bundles]
        first, second = ray.get([engine.call(Device.gpus) for engine in engines])
        of_ranks = ray.get([rank.gpus.remote() for rank in ranks])
    finally:
        placement.remove()
    assert [first, second] == of_ranks and first != second and len(first) == 1


class Device:
    def gpus(self) -> list[Any]:
        import ray

        return ray.get_gpu_ids()
