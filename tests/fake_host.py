"""Builds sysfs and procfs trees of hosts that this one is not."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from placement.cpulist import format_list, parse_kernel_list
from placement.topology import Topology, read_topology

MIB = 1 << 20
GIB = 1 << 30


@dataclass
class FakeNode:
    """A node to be written. Memory is in MiB; `cpus` is a kernel list."""

    cpus: str = ""
    memory: int = 8192
    free: int | None = None
    file_cache: int = 0
    distances: tuple[int, ...] | None = None


@dataclass
class FakeHost:
    """A host in a folder. `siblings` are kernel lists, one per core; CPUs in none have a core of their own."""

    root: Path
    nodes: dict[int, FakeNode]
    siblings: list[str] = field(default_factory=list)
    offline: str = ""
    smt_files: bool = True
    node_directory: bool = True
    mems_allowed: str | None = None

    @property
    def sysfs(self) -> Path:
        return self.root / "sys"

    @property
    def procfs(self) -> Path:
        return self.root / "proc"

    def build(self) -> FakeHost:
        offline = set(parse_kernel_list(self.offline))
        cpus = sorted({cpu for node in self.nodes.values() for cpu in parse_kernel_list(node.cpus)} | offline)
        online = [cpu for cpu in cpus if cpu not in offline]
        write(self.sysfs / "devices/system/cpu/online", format_list(online))
        write(self.sysfs / "devices/system/cpu/present", format_list(cpus))
        for cpu in cpus:
            self._write_cpu(cpu, offline)
        if self.node_directory:
            write(self.sysfs / "devices/system/node/online", format_list(self.nodes))
            for node_id, node in self.nodes.items():
                self._write_node(node_id, node, online)
        total = sum(node.memory for node in self.nodes.values())
        write(self.procfs / "meminfo", f"MemTotal: {total * 1024} kB\nMemFree: {total * 512} kB")
        allowed = format_list(self.nodes) if self.mems_allowed is None else self.mems_allowed
        write(self.procfs / "self/status", f"Name:\ttest\nMems_allowed_list:\t{allowed}\n")
        write(self.procfs / "sys/kernel/numa_balancing", "3")
        write(self.procfs / "sys/vm/zone_reclaim_mode", "0")
        write(self.sysfs / "kernel/mm/transparent_hugepage/enabled", "always [madvise] never")
        write(
            self.sysfs / "kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise [never]"
        )
        return self

    def read(self, affinity: str | None = None) -> Topology:
        """The topology of this host, with all of its CPUs in the affinity unless told otherwise."""
        everything = [cpu for node in self.nodes.values() for cpu in parse_kernel_list(node.cpus)]
        chosen = everything if affinity is None else parse_kernel_list(affinity)
        return read_topology(self.sysfs, self.procfs, affinity=chosen)

    def add_pci(self, address: str, class_code: int, vendor: int, node: int, interface: str = "") -> None:
        directory = self.sysfs / "bus/pci/devices" / address
        write(directory / "class", f"0x{class_code:06x}")
        write(directory / "vendor", f"0x{vendor:04x}")
        write(directory / "device", "0x2330")
        write(directory / "numa_node", str(node))
        if interface:
            (directory / interface).mkdir(parents=True)

    def add_cgroup_v2(self, path: str, files: dict[str, dict[str, str]]) -> None:
        """Put this process in `path` of a unified hierarchy; `files` maps a group's path to its files."""
        write(self.procfs / "self/cgroup", f"0::{path}")
        write(self.procfs / "self/mountinfo", "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw")
        for group, contents in files.items():
            for name, text in contents.items():
                write(self.sysfs / "fs/cgroup" / group.strip("/") / name, text)

    def _write_cpu(self, cpu: int, offline: set[int]) -> None:
        directory = self.sysfs / f"devices/system/cpu/cpu{cpu}"
        directory.mkdir(parents=True)
        # The kernel removes the topology folder of an offline CPU.
        if cpu in offline or not self.smt_files:
            return
        core = next((core for core in self.siblings if cpu in parse_kernel_list(core)), str(cpu))
        listed = format_list(set(parse_kernel_list(core)) - offline)
        write(directory / "topology/thread_siblings_list", listed)
        write(directory / "topology/physical_package_id", "0")

    def _write_node(self, node_id: int, node: FakeNode, online: list[int]) -> None:
        directory = self.sysfs / f"devices/system/node/node{node_id}"
        cpus = set(parse_kernel_list(node.cpus)) & set(online)
        write(directory / "cpulist", format_list(cpus))
        free = node.memory if node.free is None else node.free
        figures = {"MemTotal": node.memory, "MemFree": free, "Inactive(file)": node.file_cache}
        write(
            directory / "meminfo",
            "\n".join(f"Node {node_id} {name}:  {mib * 1024} kB" for name, mib in figures.items()),
        )
        write(directory / "hugepages/hugepages-2048kB/nr_hugepages", "4")
        write(directory / "hugepages/hugepages-2048kB/free_hugepages", "3")
        distances = node.distances or tuple(10 if other == node_id else 20 for other in self.nodes)
        write(directory / "distance", " ".join(map(str, distances)))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def pairs(first: range, offset: int) -> list[str]:
    """SMT cores whose second thread has the number of the first plus `offset`."""
    return [f"{cpu},{cpu + offset}" for cpu in first]


def two_nodes_smt(root: Path, **changes: object) -> FakeHost:
    """2 nodes of 4 cores with 2 threads each; CPUs 8-15 are the siblings."""
    nodes = {0: FakeNode("0-3,8-11"), 1: FakeNode("4-7,12-15")}
    return FakeHost(root, nodes, siblings=pairs(range(8), 8), **changes).build()  # type: ignore[arg-type]


def plain_nodes(root: Path, cpus_per_node: int, count: int = 2, memory: int = 8192) -> FakeHost:
    """`count` nodes of `cpus_per_node` cores without SMT and `memory` MiB each."""
    nodes = {
        node: FakeNode(f"{node * cpus_per_node}-{(node + 1) * cpus_per_node - 1}", memory)
        for node in range(count)
    }
    return FakeHost(root, nodes).build()
