"""A provider of nodes for Ray's autoscaler that are processes of this machine."""

from __future__ import annotations

from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class Simulated(FakeMultiNodeProvider):
    """Ray's own, whose nodes cannot be told their memory: they have what the machine has."""

    def create_node_with_resources_and_labels(
        self, node_config: Any, tags: Any, count: int, resources: dict[str, float], labels: Any
    ) -> None:
        told = {name: amount for name, amount in resources.items() if name != "memory"}
        super().create_node_with_resources_and_labels(node_config, tags, count, told, labels)
