"""Whether weights, KV caches and processes fit into each node and under the control group's limit, and how
much KV fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from placement.cpulist import format_list
from placement.sizes import format_bytes
from placement.topology import Topology

_MIB = 1 << 20
# A worker beside its KV cache and the weights, and a unit's parent with everything imported.
WORKER_BYTES = 120 * _MIB
UNIT_BYTES = 256 * _MIB
# Past its capacity a bound node wakes the OOM killer instead of failing, so some of it is never planned for.
_NODE_MARGIN_BYTES = 64 * _MIB
_NODE_MARGIN_SHARE = 50

_MOST_KV_BYTES = 4 << 30
_FULL_CONTEXT_REQUESTS = 64


@dataclass(frozen=True)
class WeightsDemand:
    """One segment: the nodes that hold it and its bytes. `even` spreads it equally, else it fills one node
    after another.
    """

    nodes: tuple[int, ...]
    size: int
    even: bool


@dataclass(frozen=True)
class WorkerDemand:
    """One worker: the nodes that hold its KV cache."""

    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Shortfall:
    """A resource that does not suffice, and the figures."""

    subject: str
    reason: str


class MemoryBudget:
    """What a layout takes from each node. All sizes are in bytes, KV sizes per worker.

    `kv_bytes` is what was asked for; None chooses from what is free, at least `kv_floor_bytes` (one request
    of full context length).
    """

    def __init__(
        self,
        topology: Topology,
        weights: Sequence[WeightsDemand],
        workers: Sequence[WorkerDemand],
        kv_block_bytes: int,
        kv_floor_bytes: int,
        kv_bytes: int | None,
    ):
        self._topology = topology
        self._weights = weights
        self._workers = workers
        self._block = max(1, kv_block_bytes)
        self._floor = kv_floor_bytes
        self._asked = kv_bytes

    def shortfalls(self) -> list[Shortfall]:
        """What does not fit with the asked KV cache, or with the smallest one where none was asked for."""
        kv = self._floor if self._asked is None else self._asked
        found = self._shortfalls(kv)
        if found and kv > self._floor and not self._shortfalls(self._floor):
            most = min(self._largest_kv())
            reason = (
                f"{format_bytes(kv)} for each of {len(self._workers)} workers does not fit, {found[0].reason}"
            )
            return [Shortfall("--kv-cache-memory", f"{reason}; at most {format_bytes(most)} does")]
        return found

    def kv_bytes_per_worker(self) -> list[int]:
        """The KV cache of each worker in whole blocks: as asked, else half of what the node has left, within
        bounds.
        """
        if self._asked is not None:
            return [self._asked // self._block * self._block] * len(self._workers)
        most = min(_MOST_KV_BYTES, _FULL_CONTEXT_REQUESTS * self._floor)
        chosen = [max(self._floor, min(most, room // 2)) for room in self._largest_kv()]
        return [size // self._block * self._block for size in chosen]

    def _largest_kv(self) -> list[int]:
        """For each worker, the most that its KV cache could take if all workers of its nodes took as much."""
        left, _ = self._left(0)
        sharing = Counter(worker.nodes for worker in self._workers)
        rooms = [
            sum(left[node] for node in worker.nodes) // sharing[worker.nodes] for worker in self._workers
        ]
        limit = self._topology.tightest_memory_limit
        if limit is not None:
            spare = (limit.available - self._total(0)) // len(self._workers)
            rooms = [min(room, spare) for room in rooms]
        return [max(0, room) for room in rooms]

    def _shortfalls(self, kv: int) -> list[Shortfall]:
        left, missing = self._left(kv)
        found = [self._node_shortfall(node, kv, left[node]) for node in sorted(left) if left[node] < 0]
        found += [
            Shortfall(
                f"memory of nodes {format_list(nodes)}",
                f"lacks {format_bytes(lack)} for {self._breakdown(kv)}",
            )
            for nodes, lack in missing.items()
            if all(left[node] >= 0 for node in nodes)
        ]
        limit = self._topology.tightest_memory_limit
        if limit is not None and self._total(kv) > limit.available:
            reason = (
                f"{format_bytes(self._total(kv))} needed ({self._breakdown(kv)}), "
                f"{format_bytes(limit.available)} left of {format_bytes(limit.limit)} in {limit.path}"
            )
            found.append(Shortfall("cgroup memory limit", reason))
        return found

    def _left(self, kv: int) -> tuple[dict[int, int], dict[tuple[int, ...], int]]:
        """Bytes left on each node in use (negative: lacking), and what lacks on sets of nodes that may fill
        each other.
        """
        used = {node for demand in self._demands(kv) for node in demand[0]}
        left = {node: self._room(node) for node in used}
        missing: dict[tuple[int, ...], int] = {}
        for nodes, size, even in sorted(
            self._demands(kv), key=lambda demand: (not demand[2], len(demand[0]))
        ):
            if even or len(nodes) == 1:
                for node in nodes:
                    left[node] -= -(-size // len(nodes))
                continue
            for node in nodes:
                taken = min(size, max(0, left[node]))
                left[node] -= taken
                size -= taken
            if size:
                missing[nodes] = missing.get(nodes, 0) + size
        return left, missing

    def _demands(self, kv: int) -> list[tuple[tuple[int, ...], int, bool]]:
        """(nodes, bytes, evenly spread) of everything that is allocated."""
        demands = [(weights.nodes, weights.size, weights.even) for weights in self._weights]
        demands += [(weights.nodes, UNIT_BYTES, False) for weights in self._weights]
        demands += [(worker.nodes, kv + WORKER_BYTES, False) for worker in self._workers]
        return demands

    def _total(self, kv: int) -> int:
        return sum(size for _, size, _ in self._demands(kv)) + _NODE_MARGIN_BYTES

    def _room(self, node: int) -> int:
        """What may be planned for on a node."""
        known = self._topology.node(node)
        return known.memory_available - self._margin(node)

    def _margin(self, node: int) -> int:
        return _NODE_MARGIN_BYTES + self._topology.node(node).memory_total // _NODE_MARGIN_SHARE

    def _node_shortfall(self, node: int, kv: int, left: int) -> Shortfall:
        available = self._topology.node(node).memory_available
        needed, parts = format_bytes(available - left), self._breakdown(kv, node)
        reason = f"needs {needed} ({parts}), has {format_bytes(available)} available"
        return Shortfall(f"memory of node {node}", reason)

    def _breakdown(self, kv: int, node: int | None = None) -> str:
        weights = sum(
            demand.size // len(demand.nodes) if demand.even and node is not None else demand.size
            for demand in self._weights
            if node is None or node in demand.nodes
        )
        workers = sum(node is None or node in worker.nodes for worker in self._workers)
        parts = f"{format_bytes(weights)} of weights, KV caches of {workers} x {format_bytes(kv)}"
        return f"{parts}, the rest for processes and margin"
