"""The plan: a pure function of topology, configuration and model sizes. It reads and changes nothing."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from placement.core_slices import CoreSlice, count_physical_cores, slice_cores
from placement.cpulist import format_list
from placement.memory_budget import MemoryBudget, Shortfall, WeightsDemand, WorkerDemand
from placement.node_choice import NodeChoice, NodeWishes, choose_nodes
from placement.permissions import Permissions
from placement.sizes import format_bytes
from placement.topology import Topology

# A worker wants this many physical cores before a second one on the node pays for itself.
_CORES_PER_WORKER = 8
# Every worker streams the weights through its own cores, so more of them compete for the node's bandwidth.
_MOST_WORKERS_PER_NODE = 4


class Policy(enum.Enum):
    """How weights are laid over nodes. SHARED maps the checkpoint's own files, whose page cache all workers read."""

    REPLICATE = "replicate"
    INTERLEAVE = "interleave"
    SHARED = "shared"


@dataclass(frozen=True)
class PlanRequest:
    """What the operator asked for and how large the model is. List arguments are numactl strings, None where
    not given.

    `placement` is "auto" or a policy's name. `kv_cache_bytes` is per worker; None lets the plan choose from
    free memory. `kv_block_bytes` is the size of one KV block, `min_kv_blocks` what one request of full
    context length needs. `shared_obstacle` says why the checkpoint's files cannot be used as they are, empty when
    they can. `workers_per_node` counts per node that houses workers, `workers` over the whole
    server; at most one is given.
    """

    weights_bytes: int
    kv_block_bytes: int
    min_kv_blocks: int
    placement: str = "auto"
    workers_per_node: int | None = None
    threads_per_worker: int | None = None
    kv_cache_bytes: int | None = None
    nodes: str | None = None
    cpunodebind: str | None = None
    membind: str | None = None
    interleave: str | None = None
    physcpubind: str | None = None
    workers: int | None = None
    shared_obstacle: str = ""


@dataclass(frozen=True)
class WorkerPlan:
    """One worker: its place in the server, its CPUs, and its share of memory.

    `cpus` holds one CPU of each physical core first and SMT siblings after: compute threads belong on the
    first `compute_threads` of them, the event loop on what remains. `memory_nodes` are the nodes its KV cache
    is bound to.
    """

    index: int
    unit: str
    cpus: tuple[int, ...]
    compute_threads: int
    kv_cache_bytes: int
    memory_nodes: tuple[int, ...] = ()


@dataclass(frozen=True)
class UnitPlan:
    """One placement unit: the nodes and CPUs its processes run on, and the nodes its segment is bound to.

    Under Policy.INTERLEAVE and Policy.SHARED there is one unit over all nodes, and each worker's KV cache is bound to
    the worker's own `memory_nodes`.
    """

    name: str
    nodes: tuple[int, ...]
    memory_nodes: tuple[int, ...]
    cpus: tuple[int, ...]
    weights_bytes: int
    workers: tuple[WorkerPlan, ...]


@dataclass(frozen=True)
class Refusal:
    """Something that cannot be done: the flag or resource at fault and why."""

    subject: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """The outcome. Nothing is started while `refusals` is not empty. `notes` say what was adjusted."""

    policy: Policy
    policy_reason: str
    units: tuple[UnitPlan, ...]
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()


def make_plan(request: PlanRequest, topology: Topology, permissions: Permissions | None = None) -> Plan:
    """Decide units, workers, cores, threads and bytes. What cannot be done is in `refusals`, not raised."""
    wishes = NodeWishes(
        request.nodes, request.cpunodebind, request.membind, request.interleave, request.physcpubind
    )
    refusals = _bad_values(request)
    choice = choose_nodes(wishes, topology)
    refusals += [Refusal(subject, reason) for subject, reason in choice.refusals]
    if refusals:
        return Plan(
            _named_policy(request) or Policy.REPLICATE, "refused", (), tuple(refusals), tuple(choice.notes)
        )
    planner = _Planner(request, topology, choice)
    plan = planner.plan()
    notes = choice.notes + list(plan.notes) + _permission_notes(plan.policy, permissions)
    return Plan(plan.policy, plan.policy_reason, plan.units, plan.refusals, tuple(notes))


def _named_policy(request: PlanRequest) -> Policy | None:
    if request.interleave is not None:
        return Policy.INTERLEAVE
    return next((policy for policy in Policy if policy.value == request.placement), None)


def _bad_values(request: PlanRequest) -> list[Refusal]:
    """Values that are wrong on any host, and flags that contradict each other."""
    refusals = []
    if request.placement != "auto" and request.placement not in {policy.value for policy in Policy}:
        words = ", ".join(["auto", *(policy.value for policy in Policy)])
        refusals.append(
            Refusal("--placement", f"unknown policy {request.placement!r}; expected one of {words}")
        )
    for flag, value in (
        ("--workers-per-node", request.workers_per_node),
        ("--workers", request.workers),
        ("--threads-per-worker", request.threads_per_worker),
    ):
        if value is not None and value < 1:
            refusals.append(Refusal(flag, f"must be at least 1, got {value}"))
    if request.workers is not None and request.workers_per_node is not None:
        refusals.append(Refusal("--workers", "cannot be combined with --workers-per-node"))
    if request.placement == Policy.SHARED.value and request.shared_obstacle:
        reason = f"serves files as they are, but {request.shared_obstacle}"
        refusals.append(Refusal("--placement shared", reason))
    if request.interleave is not None and request.membind is not None:
        refusals.append(Refusal("--interleave", "cannot be combined with --membind"))
    if request.interleave is not None and request.placement not in ("auto", "interleave"):
        refusals.append(Refusal("--interleave", f"cannot be combined with --placement {request.placement}"))
    if request.kv_cache_bytes is not None and request.kv_cache_bytes < max(1, request.kv_block_bytes):
        needed = format_bytes(max(1, request.kv_block_bytes))
        reason = f"{format_bytes(request.kv_cache_bytes)} does not hold one KV block of {needed}"
        refusals.append(Refusal("--kv-cache-memory", reason))
    return refusals


def _permission_notes(policy: Policy, permissions: Permissions | None) -> list[str]:
    if permissions is None or not permissions.refused:
        return []
    notes = [f"{refused}" for refused in permissions.refused]
    if not permissions.of("mbind").permitted:
        what = (
            "pages cannot be spread evenly"
            if policy is Policy.INTERLEAVE
            else "first touch alone places pages"
        )
        notes.append(f"without mbind {what}; the verdict reports where they are")
    return notes


@dataclass(frozen=True)
class _Place:
    """A worker before memory is known."""

    node: int
    slice: CoreSlice


class _Planner:
    """Finds the first policy and number of workers that fits."""

    def __init__(self, request: PlanRequest, topology: Topology, choice: NodeChoice):
        self._request = request
        self._topology = topology
        self._choice = choice
        self._homes = sorted(choice.cpus)

    def plan(self) -> Plan:
        named = _named_policy(self._request)
        candidates = [named] if named else [Policy.REPLICATE, Policy.INTERLEAVE]
        if named is None and len(self._domains()) == 1:
            candidates = [Policy.REPLICATE]
        shortfalls: dict[Policy, Sequence[Shortfall]] = {}
        for policy in candidates:
            counts = self._wanted_workers()
            while True:
                places = self._places(counts)
                budget = self._budget(policy, places)
                found = budget.shortfalls()
                shortfalls.setdefault(policy, found)
                if not found:
                    notes = self._notes(policy, places, counts)
                    return Plan(
                        policy,
                        self._reason(policy, shortfalls),
                        self._units(policy, places, budget),
                        (),
                        notes,
                    )
                if not self._may_shrink(counts):
                    break
                counts = {node: max(1, count - 1) for node, count in counts.items()}
        refusals = tuple(
            Refusal(item.subject, item.reason if len(shortfalls) == 1 else f"{policy.value}: {item.reason}")
            for policy, items in shortfalls.items()
            for item in items
        )
        return Plan(candidates[0], "refused", (), refusals, ())

    def _domains(self) -> dict[tuple[int, ...], list[int]]:
        """Memory domain -> the nodes whose workers use it. The weights exist once in each."""
        domains: dict[tuple[int, ...], list[int]] = {}
        for home in self._homes:
            domains.setdefault(self._choice.memory[home], []).append(home)
        return domains

    def _wanted_workers(self) -> dict[int, int]:
        request = self._request
        if request.workers_per_node is not None:
            return dict.fromkeys(self._homes, request.workers_per_node)
        if request.workers is not None:
            each, more = divmod(request.workers, len(self._homes))
            counts = {node: each + (position < more) for position, node in enumerate(self._homes)}
            return {node: count for node, count in counts.items() if count}
        return {node: self._default_workers(node) for node in self._homes}

    def _default_workers(self, node: int) -> int:
        cores = count_physical_cores(self._topology.cpu(cpu) for cpu in self._choice.cpus[node])
        return max(1, min(_MOST_WORKERS_PER_NODE, cores // _CORES_PER_WORKER))

    def _may_shrink(self, counts: dict[int, int]) -> bool:
        asked = self._request.workers_per_node is not None or self._request.workers is not None
        return not asked and max(counts.values()) > 1

    def _places(self, counts: dict[int, int]) -> list[_Place]:
        places: list[_Place] = []
        for node, count in counts.items():
            cpus = [self._topology.cpu(cpu) for cpu in self._choice.cpus[node]]
            places.extend(_Place(node, part) for part in slice_cores(cpus, count))
        return places

    def _weights_nodes(self, policy: Policy, places: list[_Place]) -> list[tuple[int, ...]]:
        """The memory nodes of each segment."""
        used = sorted({place.node for place in places})
        if policy is Policy.REPLICATE:
            return list(dict.fromkeys(self._choice.memory[node] for node in used))
        if policy is Policy.INTERLEAVE and self._choice.interleave is not None:
            return [self._choice.interleave]
        return [tuple(sorted({memory for node in self._homes for memory in self._choice.memory[node]}))]

    def _budget(self, policy: Policy, places: list[_Place]) -> MemoryBudget:
        request = self._request
        weights = [
            WeightsDemand(nodes, request.weights_bytes, even=policy is Policy.INTERLEAVE)
            for nodes in self._weights_nodes(policy, places)
        ]
        workers = [WorkerDemand(self._choice.memory[place.node]) for place in places]
        return MemoryBudget(
            self._topology,
            weights,
            workers,
            kv_block_bytes=request.kv_block_bytes,
            kv_floor_bytes=request.kv_block_bytes * request.min_kv_blocks,
            kv_bytes=request.kv_cache_bytes,
        )

    def _units(self, policy: Policy, places: list[_Place], budget: MemoryBudget) -> tuple[UnitPlan, ...]:
        units: list[UnitPlan] = []
        index = 0
        kv_bytes = budget.kv_bytes_per_worker()
        for weights_nodes in self._weights_nodes(policy, places):
            mine = [
                (place, kv_bytes[position])
                for position, place in enumerate(places)
                if policy is not Policy.REPLICATE or self._choice.memory[place.node] == weights_nodes
            ]
            nodes = tuple(sorted({place.node for place, _ in mine}))
            name = "node" + format_list(nodes).replace(",", "+")
            workers = tuple(
                WorkerPlan(
                    index=index + offset,
                    unit=name,
                    cpus=place.slice.cpus,
                    compute_threads=self._threads(place, len(places)),
                    kv_cache_bytes=kv,
                    memory_nodes=self._choice.memory[place.node],
                )
                for offset, (place, kv) in enumerate(mine)
            )
            index += len(workers)
            cpus = tuple(sorted(cpu for node in nodes for cpu in self._choice.cpus[node]))
            units.append(UnitPlan(name, nodes, weights_nodes, cpus, self._request.weights_bytes, workers))
        return tuple(units)

    def _threads(self, place: _Place, workers: int) -> int:
        if self._request.threads_per_worker is not None:
            return self._request.threads_per_worker
        quota = self._topology.cpu_quota
        if quota is None:
            return place.slice.compute_threads
        return max(1, min(place.slice.compute_threads, int(quota / workers)))

    def _reason(self, policy: Policy, shortfalls: dict[Policy, Sequence[Shortfall]]) -> str:
        known = self._request.weights_bytes > 0
        weights = f"{format_bytes(self._request.weights_bytes)} of weights" if known else "the weights"
        domains = self._domains()
        if self._request.interleave is not None:
            return f"--interleave {self._request.interleave}"
        if self._request.placement != "auto":
            return f"--placement {self._request.placement}"
        if policy is Policy.INTERLEAVE:
            why = shortfalls[Policy.REPLICATE][0]
            return f"{weights} fit once over all nodes, but not on each: {why.subject} {why.reason}"
        if len(domains) == 1:
            nodes = format_list(next(iter(domains)))
            return f"the memory of node {nodes} alone is used, so one copy serves every worker"
        return f"{weights} fit on each of {len(domains)} nodes, so every node reads its own copy"

    def _notes(self, policy: Policy, places: list[_Place], counts: dict[int, int]) -> tuple[str, ...]:
        notes = []
        if policy is Policy.SHARED and len(self._domains()) > 1:
            notes.append("one page cache for all nodes: most workers read some weights from another node")
        wanted = self._wanted_workers()
        for node, count in counts.items():
            if count < wanted[node]:
                notes.append(f"node {node}: {count} workers instead of {wanted[node]}, memory holds no more")
        idle = set(self._homes) - set(counts)
        if idle:
            notes.append(
                f"--workers {self._request.workers}: nodes {format_list(idle)} stay without a worker"
            )
        for node, count in Counter(place.node for place in places if place.slice.shared).items():
            cpus = len(self._choice.cpus[node])
            notes.append(f"node {node}: {count} workers share {cpus} CPUs, so they slow each other down")
        asked = self._request.threads_per_worker
        if asked is not None and any(asked > len(place.slice.cpus) for place in places):
            notes.append(f"--threads-per-worker {asked}: more threads than some worker has CPUs")
        quota = self._topology.cpu_quota
        if quota is not None and quota < sum(len(self._choice.cpus[node]) for node in counts):
            notes.append(f"the cgroup grants {quota:g} CPUs of time: threads are limited to it, or throttled")
        floor = self._request.kv_block_bytes * self._request.min_kv_blocks
        if self._request.kv_cache_bytes is not None and self._request.kv_cache_bytes < floor:
            given, needed = format_bytes(self._request.kv_cache_bytes), format_bytes(floor)
            notes.append(f"--kv-cache-memory {given}: a request of full context length needs {needed}")
        return tuple(notes)
