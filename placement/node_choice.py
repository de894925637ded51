"""Which nodes house workers and which hold their memory: numactl's words met with what the host has and
allows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from placement.cpulist import ListError, format_list, parse_numactl_list
from placement.topology import Topology


@dataclass(frozen=True)
class NodeWishes:
    """Lists as numactl strings, None where not given. `nodes` and `cpunodebind` mean the same."""

    nodes: str | None = None
    cpunodebind: str | None = None
    membind: str | None = None
    interleave: str | None = None
    physcpubind: str | None = None


@dataclass
class NodeChoice:
    """The outcome. `cpus` maps a node that houses workers to its usable CPUs, `memory` to the nodes that hold
    its memory.

    `interleave` are the nodes that `--interleave` names, None where it was not given. `refusals` are (flag or
    resource, reason) pairs.
    """

    cpus: dict[int, tuple[int, ...]] = field(default_factory=dict)
    memory: dict[int, tuple[int, ...]] = field(default_factory=dict)
    interleave: tuple[int, ...] | None = None
    refusals: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def choose_nodes(wishes: NodeWishes, topology: Topology) -> NodeChoice:
    """Decide where workers run and where their memory goes. Nodes that are refused are dropped with a note
    while others remain; what does not exist, and a list of which nothing remains, is a refusal.
    """
    choice = NodeChoice()
    try:
        usable = _usable_cpus(wishes.physcpubind, topology, choice)
        homes = _homes(wishes, topology, usable, choice)
        for node in homes:
            choice.cpus[node] = tuple(cpu for cpu in topology.node(node).cpus if cpu in usable)
        membind = _memory_list("--membind", wishes.membind, topology, choice)
        choice.interleave = _memory_list("--interleave", wishes.interleave, topology, choice)
        choice.memory = _memory_of_homes(homes, membind, topology, choice)
    except ListError as error:
        choice.refusals.append((error.subject, error.reason))
    return choice


def nearest(topology: Topology, node: int, candidates: Collection[int]) -> int:
    """The candidate at the least distance from `node`, the lowest id among equals."""
    distances = topology.node(node).distances
    return min(candidates, key=lambda other: (distances.get(other, 255), other))


def _usable_cpus(physcpubind: str | None, topology: Topology, choice: NodeChoice) -> frozenset[int]:
    usable = frozenset(topology.usable_cpus)
    if not usable:
        raise ListError("cpuset", "affinity and cpuset leave no online CPU to this process")
    if physcpubind is None:
        return usable
    flag = "--physcpubind"
    online = {cpu.id for cpu in topology.cpus if cpu.online}
    asked = set(parse_numactl_list(physcpubind, flag, sorted(online), sorted(usable)))
    existing = {cpu.id for cpu in topology.cpus}
    if asked - existing:
        raise ListError(flag, f"{_cpus(asked - existing)} not exist; this host has {format_list(existing)}")
    if asked - online:
        raise ListError(flag, f"CPUs {format_list(asked - online)} are offline")
    if not asked & usable:
        reason = f"none of {format_list(asked)} may be used; affinity and cpuset allow {format_list(usable)}"
        raise ListError(flag, reason)
    outside = asked - usable
    if outside:
        choice.notes.append(f"{flag}: {format_list(outside)} left out, outside affinity or cpuset")
    return frozenset(asked & usable)


def _cpus(ids: Collection[int]) -> str:
    return f"CPU {format_list(ids)} does" if len(ids) == 1 else f"CPUs {format_list(ids)} do"


def _homes(wishes: NodeWishes, topology: Topology, usable: frozenset[int], choice: NodeChoice) -> list[int]:
    """The nodes that house workers: those asked for that have a usable CPU."""
    with_cpus = [node.id for node in topology.nodes if usable & set(node.cpus)]
    asked = set(with_cpus)
    flag = "--physcpubind" if wishes.physcpubind else "cpuset"
    for name, text in (("--nodes", wishes.nodes), ("--cpunodebind", wishes.cpunodebind)):
        if text is None:
            continue
        listed = set(_existing_nodes(name, text, topology))
        homes = listed & set(with_cpus)
        if not homes:
            raise ListError(name, _why_no_home(listed, topology, wishes.physcpubind))
        if listed - homes and text.strip() != "all":
            why = _why_no_home(listed - homes, topology, wishes.physcpubind)
            choice.notes.append(f"{name}: {format_list(listed - homes)} left out, {why}")
        if not homes & asked:
            raise ListError(name, f"nodes {format_list(homes)} have nothing in common with {flag}")
        asked &= homes
        flag = name
    if not asked:
        raise ListError(flag, "no node has a CPU that may be used")
    return sorted(asked)


def _why_no_home(nodes: Collection[int], topology: Topology, physcpubind: str | None) -> str:
    if not any(topology.node(node).has_cpu for node in nodes):
        return "no CPU there to house a worker; memory of such a node is used through --membind"
    if physcpubind is not None:
        return f"no CPU there is among --physcpubind {physcpubind}"
    return f"no CPU there is within affinity and cpuset ({format_list(topology.usable_cpus)})"


def _existing_nodes(flag: str, text: str, topology: Topology) -> tuple[int, ...]:
    existing = [node.id for node in topology.nodes]
    listed = parse_numactl_list(text, flag, existing, topology.allowed_nodes)
    missing = set(listed) - set(existing)
    if missing:
        subject = (
            f"node {format_list(missing)} does" if len(missing) == 1 else f"nodes {format_list(missing)} do"
        )
        raise ListError(flag, f"{subject} not exist; this host has {format_list(existing)}")
    if not listed:
        raise ListError(flag, f"{text!r} leaves no node")
    return listed


def _memory_list(
    flag: str, text: str | None, topology: Topology, choice: NodeChoice
) -> tuple[int, ...] | None:
    """The nodes of a memory flag that have memory and may be named by a policy."""
    if text is None:
        return None
    listed = _existing_nodes(flag, text, topology)
    empty = [node for node in listed if not topology.node(node).has_memory]
    outside = [node for node in listed if node not in topology.allowed_nodes and node not in empty]
    kept = tuple(node for node in listed if node not in empty and node not in outside)
    reasons = [f"{format_list(empty)} without memory"] if empty else []
    if outside:
        allowed = format_list(topology.allowed_nodes)
        reasons.append(f"{format_list(outside)} outside Mems_allowed ({allowed}; cpuset.mems widens it)")
    if not kept:
        raise ListError(flag, f"no node left: {' and '.join(reasons)}")
    if reasons and text.strip() != "all":
        choice.notes.append(f"{flag}: left out {' and '.join(reasons)}")
    return kept


def _memory_of_homes(
    homes: Sequence[int], membind: tuple[int, ...] | None, topology: Topology, choice: NodeChoice
) -> dict[int, tuple[int, ...]]:
    """The memory nodes of each home. Memory-only nodes serve only when --membind names them, or when nothing
    else can.
    """
    if membind is not None:
        return _share_out(homes, membind, topology)
    allowed = [node for node in topology.nodes if node.has_memory and node.id in topology.allowed_nodes]
    if not allowed:
        raise ListError("cpuset", "no node with memory is allowed to this process (Mems_allowed)")
    candidates = [node.id for node in allowed if node.has_cpu] or [node.id for node in allowed]
    memory: dict[int, tuple[int, ...]] = {}
    for home in homes:
        if home in candidates:
            memory[home] = (home,)
            continue
        other = nearest(topology, home, candidates)
        memory[home] = (other,)
        why = "is outside Mems_allowed" if topology.node(home).has_memory else "has no memory"
        choice.notes.append(f"node {home} {why}: its workers' memory goes to the nearest node, {other}")
    return memory


def _share_out(
    homes: Sequence[int], membind: Iterable[int], topology: Topology
) -> dict[int, tuple[int, ...]]:
    """Give each node of --membind to the home that it is, else to the nearest home; a home left without joins
    another.
    """
    nodes = list(membind)
    shares: dict[int, list[int]] = {home: [home] for home in homes if home in nodes}
    for node in nodes:
        if node not in shares:
            closest = min(homes, key=lambda home: (topology.node(home).distances.get(node, 255), home))
            shares.setdefault(closest, []).append(node)
    owner = {node: home for home, share in shares.items() for node in share}
    for home in homes:
        # The whole share of the home that owns the nearest node, so that both use one copy of the weights.
        if home not in shares:
            shares[home] = shares[owner[nearest(topology, home, nodes)]]
    return {home: tuple(shares[home]) for home in homes}
