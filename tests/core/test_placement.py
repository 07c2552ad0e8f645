"""The placement plan: what a run asks for, and the numbers in the error when it does not fit."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayrft.config import load_config
from rayrft.core.bundles import Bundles, ClusterNode, check_placement
from rayrft.core.parts.table import plan_placement
from rayrft.core.placement import Placement, show_plan
from rayrft.errors import ConfigError, PlacementError
from tests.config.given import base
from tests.conftest import ROOT

GIB = 1 << 30
LAPTOP = {"CPU": 2.0, "memory": 8.0 * GIB}


def nodes(*resources: dict[str, float], labels: str = "") -> list[ClusterNode]:
    """Nodes node-0, node-1, … with these resources, and each with the zone that is its letter in ``labels``."""
    zones = [{"zone": letter} for letter in labels] or [{}] * len(resources)
    return [ClusterNode(f"node-{i}", each, zones[i]) for i, each in enumerate(resources)]


def test_the_quickstart_fits_two_cores() -> None:
    parts = plan_placement(load_config(ROOT / "jobs" / "quickstart.yaml"))
    check_placement(parts, nodes(LAPTOP))


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
        check_placement(plan_placement(load_config(base(), override)), nodes(LAPTOP))


def test_a_bundle_that_no_single_node_can_hold_is_an_error_with_the_need_and_the_free_of_every_node() -> None:
    parts = plan_placement(load_config(base(), {"explorer.engine.count": 1, "explorer.engine.cpus": 3}))
    with pytest.raises(PlacementError) as refused:
        check_placement(parts, nodes(*[LAPTOP] * 10))
    problem = refused.value.problem
    assert "0 of 1 bundles of 'engines' fit" in problem and "a bundle needs 3 CPU, 0 GPU, 1.8 GiB" in problem
    assert "node-5 2 CPU, 0 GPU, 8 GiB" in problem and problem.endswith("2 more nodes")


def test_spread_bundles_take_the_nodes_in_turn_and_packed_ones_fill_them() -> None:
    config = load_config(base(), {"placement.engines": "spread", "explorer.engine.cpus": 0.8})
    spread = [part for part in plan_placement(config) if part.name == "engines"]
    last = [part("last", 1, cpus=1.5)]
    check_placement([part("engines", 2, cpus=0.8), *last], nodes(LAPTOP, LAPTOP))
    with pytest.raises(PlacementError, match="0 of 1 bundles of 'last'"):
        check_placement(spread + last, nodes(LAPTOP, LAPTOP))
    assert "spread over nodes" in show_plan("a", spread)


@pytest.mark.parametrize(
    ("wanted", "fits"), [("a", 1), ("c", 0), ("!a", 1), ("in(a, b)", 2), ("!in(a,b)", 0), ("!in(c)", 2)]
)
def test_a_group_with_labels_is_placed_only_on_nodes_that_have_them(wanted: str, fits: int) -> None:
    labels = {"engines": {"zone": wanted}}
    config = load_config(base(), {"placement.labels": labels, "explorer.engine.cpus": 1.2, "explorer.engine.count": 3})
    parts = [part for part in plan_placement(config) if part.name == "engines"]
    with pytest.raises(PlacementError, match=f"{fits} of 3 bundles of 'engines' fit .* with {{'zone'"):
        check_placement(parts, nodes(LAPTOP, LAPTOP, labels="ab"))


def test_labels_of_an_unknown_group_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"placement.labels.*engine'.*engines"):
        plan_placement(load_config(base(), {"placement.labels": {"engine": {"zone": "a"}}}))


def part(name: str, count: int, cpus: float = 0.1, gpus: float = 0.0) -> Bundles:
    return Bundles(name, count, cpus, gpus, 0.1, "")


@pytest.mark.parametrize(
    ("parts", "free", "left_over"),
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
def test_what_fits_nowhere_is_named(parts: list[Bundles], free: list[dict[str, float]], left_over: str | None) -> None:
    if left_over is None:
        check_placement(parts, nodes(*free))
    else:
        with pytest.raises(PlacementError, match=f"of '{left_over}' fit"):
            check_placement(parts, nodes(*free))


LENT: dict[str, Any] = {
    "explorer.engine": {"count": 1, "tensor_parallel": 2, "gpus": 0.3, "cpus": 0.1},
    "trainer": {"ranks": 2, "gpus": 0.4, "cpus": 0.2},
}
SHARED = {"explorer.engine.gpus": 0.3, "trainer.gpus": 0.4, "explorer.engine.cpus": 0.1, "trainer.cpus": 0.2}


def test_engines_and_ranks_that_share_gpus_share_their_bundles() -> None:
    config = load_config(base(), {**SHARED, "explorer.engine.count": 2, "trainer.ranks": 2})
    parts = {part.name: part for part in plan_placement(config)}
    assert "ranks" not in parts and parts["engines"].count == 2
    assert parts["engines"].bundle == {"CPU": 0.3, "GPU": 0.7, "memory": 3.0 * GIB}
    assert "a:ranks" in show_plan("a", list(parts.values()))
    [engines] = [each for each in plan_placement(load_config(base(), LENT)) if each.name == "engines"]
    assert engines.bundle == {"CPU": 0.5, "GPU": 2.0, "memory": 4.2 * GIB}, "an engine, and the ranks of its GPUs"
    check_placement([engines], nodes({"CPU": 1.0, "GPU": 2.0, "memory": 8.0 * GIB}))
    with pytest.raises(PlacementError, match="2 GPU"):
        check_placement([engines], nodes(*[{"CPU": 1.0, "GPU": 1.0, "memory": 8.0 * GIB}] * 2))


def test_each_engine_is_on_the_gpu_of_its_rank_and_of_no_other(ray_cluster: Any) -> None:
    if ray.cluster_resources().get("GPU", 0) < 2:
        pytest.skip("needs 2 GPUs, or what Ray takes for them")
    config = load_config(base(), {**SHARED, "explorer.engine.count": 2, "trainer.ranks": 2})
    parts = plan_placement(config)
    placement = Placement("pairs", parts)
    placement.reserve([part.name for part in parts if part.name in ("engines", "ranks")])
    try:
        engines = [placement.actor(Device, "engines", bundle=index)() for index in range(2)]
        device = ray.remote(num_cpus=config.trainer.cpus, num_gpus=config.trainer.gpus)(Device)
        bundles = [PlacementGroupSchedulingStrategy(placement.ranks, index) for index in range(2)]
        ranks = [device.options(scheduling_strategy=bundle).remote() for bundle in bundles]
        first, second = ray.get([engine.call(Device.gpus) for engine in engines])
        of_ranks = ray.get([rank.gpus.remote() for rank in ranks])
    finally:
        placement.remove()
    assert [first, second] == of_ranks and first != second and len(first) == 1
    # Ranks have their GPUs whole in Ray's books, and lend them to an engine of several, which has none.
    parts = plan_placement(load_config(base(), LENT))
    placement = Placement("lent", parts)
    placement.reserve(["engines"])
    try:
        engine = placement.actor(Device, "engines", bundle=0)()
        [bundle] = [PlacementGroupSchedulingStrategy(placement.ranks, 0)]
        device = ray.remote(num_cpus=config.trainer.cpus, num_gpus=1)(Device)
        ranks = [device.options(scheduling_strategy=bundle).remote() for _ in range(2)]
        [first, second] = ray.get([rank.gpus.remote() for rank in ranks])
        assert ray.get(engine.call(Device.gpus)) == [] and first != second and len(first) == len(second) == 1
    finally:
        placement.remove()


class Device:
    def gpus(self) -> list[Any]:
        return ray.get_gpu_ids()


LATE = """
import ray
from ray.cluster_utils import Cluster
from rayrft.core.bundles import Bundles
from rayrft.core.placement import Placement
from rayrft.runtime.handle import NAMESPACE

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False)
engines = Bundles("engines", 2, 1, 0, 0.1, "", spread=True, labels={"zone": "in(a,b)"})
placement = Placement("late", [Bundles("master", 1, 0.1, 0, 0.1, ""), engines])

def join(text):
    print(text)
    for zone in "cab":
        cluster.add_node(num_cpus=1, labels={"zone": zone}, wait=False)

placement.reserve(["master"], say=join)
placement.reserve(["engines"], 300, join)
zones = {node["NodeID"]: node["Labels"].get("zone") for node in ray.nodes()}
table = ray.util.placement_group_table()
print(sorted(zones[node] for group in table.values() if group["name"] == "late:engines"
             for node in group["bundles_to_node_id"].values()))
placement.remove()
"""


def test_groups_wait_for_nodes_that_join_later_and_are_placed_on_those_with_their_labels() -> None:
    # A cluster of its own, in a process of its own: the tests' cluster is connected already.
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=600, check=True)
    waiting, placed = done.stdout.splitlines()[-2:]
    assert waiting.startswith("waiting up to 300 s for room for engines (2 x 1 CPU, 0 GPU, 0.1 GiB); free: ")
    assert placed == "['a', 'b']"
