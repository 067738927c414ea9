"""How long messages take: between pipeline neighbours, and sums of gradients.

Ranks of one replica are neighbours, nodes are filled in rank order. A link that leaves a node for any replica counts as
a network link for all: the slowest replica decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from entrain_opt.plan import ParallelDegrees
from entrain_opt.spec.cluster import ClusterSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """Speeds of a cluster's links, in one direction."""

    latency_seconds: float
    link_bytes_per_second: float
    network_bytes_per_second: float
    devices_per_node: int

    @classmethod
    def of_cluster(cls, cluster: ClusterSpec, latency_seconds: float) -> Links:
        device = cluster.device_spec
        return cls(
            latency_seconds=latency_seconds,
            link_bytes_per_second=device.link_bytes_per_second,
            network_bytes_per_second=device.network_bytes_per_second,
            devices_per_node=cluster.devices_per_node,
        )

    def between(self, degrees: ParallelDegrees, source: ArrayLike, target: ArrayLike) -> NDArray[np.float64]:
        """Bytes per second between pipeline ranks and as many others."""
        nodes = nodes_of_ranks(degrees, self.devices_per_node)
        ends = np.concatenate([nodes[:, np.asarray(source)], nodes[:, np.asarray(target)]], axis=-1)
        crosses = (ends != ends[..., :1]).any(axis=(0, -1))
        return np.where(crosses, self.network_bytes_per_second, self.link_bytes_per_second)

    def neighbours(self, degrees: ParallelDegrees) -> float:
        """Bytes per second of the slowest link between neighbouring pipeline ranks."""
        nodes = nodes_of_ranks(degrees, self.devices_per_node)
        crosses = bool((nodes[:, 1:, 0] != nodes[:, :-1, 1]).any())
        return self.network_bytes_per_second if crosses else self.link_bytes_per_second

    def all_reduce_seconds(self, degrees: ParallelDegrees, num_bytes: float, context: int = 1) -> float:
        """Sum of a pipeline rank's gradients over the replicas and the `context` devices that hold the same parameters.

        On a ring for each place in a tensor group: of n devices each sends 2 (n - 1) / n of the bytes.
        """
        inside = degrees.data == 1 or degrees.world_size <= self.devices_per_node
        return self._ring_seconds(degrees.data * context, num_bytes, passes=2, inside=inside)

    def share_seconds(self, degrees: ParallelDegrees, num_bytes: float) -> float:
        """One pass around the ring of the replicas: each gets the sum of its share, or gathers the others' shares."""
        inside = degrees.world_size <= self.devices_per_node
        return self._ring_seconds(degrees.data, num_bytes, passes=1, inside=inside)

    def _ring_seconds(self, members: int, num_bytes: float, *, passes: int, inside: bool) -> float:
        if members == 1 or num_bytes <= 0:
            return 0.0
        speed = self.link_bytes_per_second if inside else self.network_bytes_per_second
        return passes * (members - 1) / members * num_bytes / speed + passes * (members - 1) * self.latency_seconds


def nodes_of_ranks(degrees: ParallelDegrees, devices_per_node: int) -> NDArray[np.int64]:
    """[replicas, pipeline ranks, 2] nodes of the first and last device of each rank.

    Replicas repeat their places within a node after at most `devices_per_node` of them, so no more are looked at.
    """
    widths = np.array(degrees.widths)
    first = np.cumsum(widths) - widths
    replicas = degrees.replica_size * np.arange(min(degrees.data, devices_per_node))
    ends = np.stack([first, first + widths - 1], axis=1)
    return (replicas[:, None, None] + ends) // devices_per_node
