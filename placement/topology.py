"""What the host has and what this process may use of it, read from sysfs and procfs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from placement.cgroups import MemoryLimit, read_cgroup_limits, read_int, read_text
from placement.cpulist import ListError, parse_kernel_list
from placement.pci import PciDevice, read_pci_devices

LOCAL_DISTANCE = 10
REMOTE_DISTANCE = 20


@dataclass(frozen=True)
class HugePages:
    """The pool of one huge page size on one node. `size` is in bytes, the others are numbers of pages."""

    size: int
    total: int
    free: int


@dataclass(frozen=True)
class Node:
    """A NUMA node. Memory figures are in bytes.

    `cpus` are its online CPUs. `memory_free` is what numactl -H calls free; `memory_available` adds file
    cache that the kernel gives up under pressure. `distances` maps every online node to its distance as in
    the ACPI SLIT (10 is local).
    """

    id: int
    cpus: tuple[int, ...]
    memory_total: int
    memory_free: int
    memory_available: int
    huge_pages: tuple[HugePages, ...]
    distances: Mapping[int, int]

    @property
    def has_cpu(self) -> bool:
        """Whether at least one CPU of the node is online."""
        return bool(self.cpus)

    @property
    def has_memory(self) -> bool:
        """Whether the node has memory."""
        return self.memory_total > 0


@dataclass(frozen=True)
class Cpu:
    """A logical CPU. `core` is the lowest CPU of its physical core, `siblings` all online CPUs of that core.

    `node` is None for an offline CPU: the kernel does not say where it belongs.
    """

    id: int
    online: bool
    node: int | None
    package: int | None
    core: int
    siblings: tuple[int, ...]


@dataclass(frozen=True)
class KernelSettings:
    """Settings that decide where pages go and whether they stay there. None where the kernel lacks the
    setting.

    `numa_balancing` is a bit mask (1: move pages to the node that uses them, 2: demote to slower memory
    tiers), `zone_reclaim_mode` too. The transparent huge page settings are the chosen word, such as "madvise"
    or "never".
    """

    numa_balancing: int | None
    thp_enabled: str | None
    thp_shmem: str | None
    zone_reclaim_mode: int | None


@dataclass(frozen=True)
class Topology:
    """The host, and what this process may use of it.

    `affinity` is the calling thread's CPU affinity and `cpuset_cpus` what the control groups allow (None: no
    word on it); `allowed_nodes` are those that memory policies may name. `memory_limits` are the control
    groups' limits, innermost first. `cpu_quota` is CFS bandwidth in CPUs. `numa_in_kernel` is False where the
    kernel has no node directory: then there is one node 0 that holds everything.
    """

    nodes: tuple[Node, ...]
    cpus: tuple[Cpu, ...]
    affinity: tuple[int, ...]
    cpuset_cpus: tuple[int, ...] | None
    allowed_nodes: tuple[int, ...]
    memory_limits: tuple[MemoryLimit, ...]
    cpu_quota: float | None
    gpus: tuple[PciDevice, ...]
    nics: tuple[PciDevice, ...]
    kernel: KernelSettings
    numa_in_kernel: bool

    @property
    def usable_cpus(self) -> tuple[int, ...]:
        """Online CPUs that both affinity and cpuset leave to this process."""
        cpuset = set(self.affinity if self.cpuset_cpus is None else self.cpuset_cpus)
        return tuple(
            cpu.id for cpu in self.cpus if cpu.online and cpu.id in cpuset and cpu.id in set(self.affinity)
        )

    @property
    def tightest_memory_limit(self) -> MemoryLimit | None:
        """The control group limit that leaves the least to allocate, None where none is set."""
        return min(self.memory_limits, key=lambda limit: limit.available, default=None)

    def node(self, node_id: int) -> Node:
        """The node with this id. Raises KeyError."""
        for node in self.nodes:
            if node.id == node_id:
                return node
        raise KeyError(f"node {node_id}")

    def cpu(self, cpu_id: int) -> Cpu:
        """The CPU with this id. Raises KeyError."""
        for cpu in self.cpus:
            if cpu.id == cpu_id:
                return cpu
        raise KeyError(f"CPU {cpu_id}")


def read_topology(
    sysfs: Path = Path("/sys"), procfs: Path = Path("/proc"), affinity: Iterable[int] | None = None
) -> Topology:
    """Read the host's topology. The roots and `affinity` (None: sched_getaffinity) are parameters so that
    other trees can be read. Unreadable parts count as absent; a host without /sys/devices/system/node has one
    node 0.
    """
    online = _online_cpus(sysfs)
    node_ids = _node_ids(sysfs)
    if node_ids:
        nodes = tuple(_read_node(sysfs, node_id, node_ids, online) for node_id in node_ids)
    else:
        nodes = (_only_node(procfs, online),)
    limits = read_cgroup_limits(sysfs, procfs)
    allowed = _allowed_nodes(procfs)
    if allowed is None:
        allowed = limits.memory_nodes
    gpus, nics = read_pci_devices(sysfs)
    return Topology(
        nodes=nodes,
        cpus=_read_cpus(sysfs, online, nodes),
        affinity=tuple(sorted(os.sched_getaffinity(0) if affinity is None else affinity)),
        cpuset_cpus=limits.cpus,
        allowed_nodes=tuple(node.id for node in nodes if allowed is None or node.id in allowed),
        memory_limits=limits.memory,
        cpu_quota=limits.cpu_quota,
        gpus=gpus,
        nics=nics,
        kernel=_kernel_settings(sysfs, procfs),
        numa_in_kernel=bool(node_ids),
    )


def _ids(path: Path) -> tuple[int, ...] | None:
    text = read_text(path)
    try:
        return None if text is None else parse_kernel_list(text, str(path))
    except ListError:
        return None


def _numbered(directory: Path, prefix: str) -> tuple[int, ...]:
    """N of every entry `prefix`N."""
    if not directory.is_dir():
        return ()
    matches = (re.fullmatch(prefix + r"(\d+)", entry.name) for entry in directory.iterdir())
    return tuple(sorted(int(match[1]) for match in matches if match))


def _online_cpus(sysfs: Path) -> tuple[int, ...]:
    root = sysfs / "devices/system/cpu"
    listed = _ids(root / "online")
    if listed:
        return listed
    return tuple(cpu for cpu in _numbered(root, "cpu") if read_int(root / f"cpu{cpu}" / "online") != 0)


def _node_ids(sysfs: Path) -> tuple[int, ...]:
    root = sysfs / "devices/system/node"
    present = _numbered(root, "node")
    online = _ids(root / "online")
    return tuple(node for node in present if online is None or node in online)


def _read_node(sysfs: Path, node_id: int, node_ids: tuple[int, ...], online: tuple[int, ...]) -> Node:
    root = sysfs / f"devices/system/node/node{node_id}"
    cpus = _ids(root / "cpulist") or ()
    return Node(
        id=node_id,
        cpus=tuple(cpu for cpu in cpus if cpu in set(online)),
        **_memory_figures(read_text(root / "meminfo") or ""),
        huge_pages=_huge_pages(root / "hugepages"),
        distances=_distances(root / "distance", node_id, node_ids),
    )


def _only_node(procfs: Path, online: tuple[int, ...]) -> Node:
    figures = _memory_figures(read_text(procfs / "meminfo") or "")
    return Node(id=0, cpus=online, **figures, huge_pages=(), distances={0: LOCAL_DISTANCE})


def _memory_figures(meminfo: str) -> dict[str, int]:
    """Figures of a node's meminfo (`Node 0 MemTotal: 1 kB`) or of the host's (`MemTotal: 1 kB`), in bytes."""
    kib = {match[1]: int(match[2]) for match in re.finditer(r"(\S+):\s+(\d+) kB", meminfo)}
    free = kib.get("MemFree", 0)
    cache = kib.get("Active(file)", 0) + kib.get("Inactive(file)", 0) - kib.get("Dirty", 0)
    # Half of the reclaimable slab, as the kernel's own MemAvailable: the rest is in use at any time.
    available = free + max(0, cache) + kib.get("SReclaimable", 0) // 2
    total = kib.get("MemTotal", 0)
    return {
        "memory_total": total * 1024,
        "memory_free": free * 1024,
        "memory_available": min(available, total) * 1024,
    }


def _huge_pages(root: Path) -> tuple[HugePages, ...]:
    if not root.is_dir():
        return ()
    pools = []
    for entry in root.iterdir():
        match = re.fullmatch(r"hugepages-(\d+)kB", entry.name)
        if match:
            total, free = read_int(entry / "nr_hugepages") or 0, read_int(entry / "free_hugepages") or 0
            pools.append(HugePages(int(match[1]) * 1024, total, free))
    return tuple(sorted(pools, key=lambda pool: pool.size))


def _distances(path: Path, node_id: int, node_ids: tuple[int, ...]) -> dict[int, int]:
    """The file holds one figure per online node, in the order of their ids."""
    figures = [int(word) for word in (read_text(path) or "").split() if word.isdigit()]
    if len(figures) == len(node_ids):
        return {other: figures[position] for position, other in enumerate(node_ids)}
    return {other: LOCAL_DISTANCE if other == node_id else REMOTE_DISTANCE for other in node_ids}


def _read_cpus(sysfs: Path, online: tuple[int, ...], nodes: tuple[Node, ...]) -> tuple[Cpu, ...]:
    root = sysfs / "devices/system/cpu"
    present = _ids(root / "present") or _numbered(root, "cpu") or online
    node_of = {cpu: node.id for node in nodes for cpu in node.cpus}
    online_set = set(online)
    cpus = []
    for cpu in sorted(set(present) | online_set):
        directory = root / f"cpu{cpu}" / "topology"
        listed = _ids(directory / "thread_siblings_list") or _ids(directory / "core_cpus_list") or ()
        siblings = tuple(sibling for sibling in listed if sibling in online_set) or (cpu,)
        package = read_int(directory / "physical_package_id")
        cpus.append(Cpu(cpu, cpu in online_set, node_of.get(cpu), package, siblings[0], siblings))
    return tuple(cpus)


def _allowed_nodes(procfs: Path) -> tuple[int, ...] | None:
    match = re.search(
        r"^Mems_allowed_list:\s*(\S*)$", read_text(procfs / "self" / "status") or "", re.MULTILINE
    )
    return parse_kernel_list(match[1], "Mems_allowed_list") if match else None


def _kernel_settings(sysfs: Path, procfs: Path) -> KernelSettings:
    return KernelSettings(
        numa_balancing=read_int(procfs / "sys/kernel/numa_balancing"),
        thp_enabled=_chosen_word(sysfs / "kernel/mm/transparent_hugepage/enabled"),
        thp_shmem=_chosen_word(sysfs / "kernel/mm/transparent_hugepage/shmem_enabled"),
        zone_reclaim_mode=read_int(procfs / "sys/vm/zone_reclaim_mode"),
    )


def _chosen_word(path: Path) -> str | None:
    """The word in brackets of a setting such as `always [madvise] never`."""
    match = re.search(r"\[(\S+)\]", read_text(path) or "")
    return match[1] if match else None
