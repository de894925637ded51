"""The host's topology as an operator reads it, and as JSON."""

from __future__ import annotations

import argparse
import errno
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from placement.core_slices import count_physical_cores
from placement.cpulist import format_list
from placement.pci import PciDevice
from placement.permissions import Permission, Permissions, probe_permissions
from placement.plan import Plan, PlanRequest, make_plan
from placement.plan_report import plan_json, plan_lines
from placement.sizes import format_bytes
from placement.topology import Node, Topology, read_topology
from placement.topology_picture import topology_html, topology_svg

SCHEMA_VERSION = 1

_BALANCING_BITS = {
    1: "moves unbound pages to the node that uses them",
    2: "demotes cold pages to slower memory",
}
_RECLAIM_BITS = {1: "reclaims on the node before going to another", 2: "writes dirty pages", 4: "swaps"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the inspection."""
    parser.add_argument("--json", action="store_true", help="print JSON, see docs/topology-schema.md")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture of the host and its units")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page with the picture and the report"
    )


def run(args: argparse.Namespace) -> int:
    """Inspect this host, print or draw what was found; returns 1 when a file cannot be written."""
    topology = read_topology()
    permissions = probe_permissions()
    plan = make_plan(PlanRequest(weights_bytes=0, kv_block_bytes=0, min_kv_blocks=0), topology)
    report = topology_lines(topology, permissions, plan)
    try:
        if args.svg is not None:
            args.svg.write_text(topology_svg(topology, plan), encoding="utf-8")
        if args.html is not None:
            args.html.write_text(topology_html(topology, plan, report), encoding="utf-8")
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    if args.svg is not None or args.html is not None:
        return 0
    if args.json:
        print(json.dumps(topology_json(topology, permissions, plan), indent=2))
    else:
        print("\n".join(report))
    return 0


def topology_lines(topology: Topology, permissions: Permissions, plan: Plan) -> list[str]:
    """The report in text. `plan` is what would be done for a model that fits every node."""
    lines = [_headline(topology)]
    for node in topology.nodes:
        lines += ["", *_node_lines(node, topology)]
    lines += ["", "distances", *_distance_lines(topology)]
    elsewhere = [device for device in (*topology.gpus, *topology.nics) if device.node is None]
    if elsewhere:
        lines += ["", "devices whose node is unknown", *(f"  {_device(device)}" for device in elsewhere)]
    lines += ["", "limits of this process", *_limit_lines(topology)]
    lines += ["", "kernel settings", *_kernel_lines(topology)]
    lines += ["", "placement calls, each tried here", *map(_permission_line, permissions.calls)]
    lines += ["", "plan for a model that fits on every node"]
    lines += [f"  {line}" for line in plan_lines(plan) if line and not line.startswith("policy")]
    return lines


def topology_json(topology: Topology, permissions: Permissions, plan: Plan) -> dict[str, Any]:
    """The report as docs/topology-schema.md describes it."""
    return {
        "schema_version": SCHEMA_VERSION,
        "numa_in_kernel": topology.numa_in_kernel,
        "nodes": [_node_json(node, topology) for node in topology.nodes],
        "cpus": [
            {
                "id": cpu.id,
                "online": cpu.online,
                "node": cpu.node,
                "package": cpu.package,
                "core": cpu.core,
                "siblings": list(cpu.siblings),
            }
            for cpu in topology.cpus
        ],
        "gpus": [_device_json(device) for device in topology.gpus],
        "nics": [_device_json(device) for device in topology.nics],
        "limits": {
            "affinity": list(topology.affinity),
            "cpuset_cpus": None if topology.cpuset_cpus is None else list(topology.cpuset_cpus),
            "usable_cpus": list(topology.usable_cpus),
            "allowed_nodes": list(topology.allowed_nodes),
            "cpu_quota": topology.cpu_quota,
            "memory": [
                {
                    "path": limit.path,
                    "limit_bytes": limit.limit,
                    "usage_bytes": limit.usage,
                    "reclaimable_bytes": limit.reclaimable,
                    "available_bytes": limit.available,
                }
                for limit in topology.memory_limits
            ],
        },
        "kernel": {
            "numa_balancing": topology.kernel.numa_balancing,
            "thp_enabled": topology.kernel.thp_enabled,
            "thp_shmem": topology.kernel.thp_shmem,
            "zone_reclaim_mode": topology.kernel.zone_reclaim_mode,
        },
        "permissions": [_permission_json(permission) for permission in permissions.calls],
        "plan": plan_json(plan),
    }


def _headline(topology: Topology) -> str:
    online = [cpu for cpu in topology.cpus if cpu.online]
    offline = len(topology.cpus) - len(online)
    memory = format_bytes(sum(node.memory_total for node in topology.nodes))
    nodes = f"{len(topology.nodes)} node{'s' if len(topology.nodes) != 1 else ''}"
    cpus = f"{len(online)} CPUs on {count_physical_cores(online)} cores"
    parts = [nodes, cpus + (f" ({offline} more offline)" if offline else ""), memory]
    return ", ".join(parts) + ("" if topology.numa_in_kernel else " (this kernel reports no nodes)")


def _node_lines(node: Node, topology: Topology) -> list[str]:
    lines = [f"node {node.id}"]
    if node.has_cpu:
        cores = count_physical_cores(topology.cpu(cpu) for cpu in node.cpus)
        usable = set(node.cpus) & set(topology.usable_cpus)
        limited = "" if len(usable) == len(node.cpus) else f", usable here: {format_list(usable) or 'none'}"
        lines.append(f"  cpus        {format_list(node.cpus)} ({len(node.cpus)} on {cores} cores{limited})")
    else:
        lines.append("  cpus        none")
    if node.has_memory:
        figures = (node.memory_total, node.memory_free, node.memory_available)
        total, free, available = (format_bytes(figure) for figure in figures)
        barred = "" if node.id in topology.allowed_nodes else ", outside Mems_allowed"
        lines.append(f"  memory      {total}, {free} free, {available} available with file cache{barred}")
    else:
        lines.append("  memory      none")
    for pool in node.huge_pages:
        if pool.total:
            lines.append(f"  huge pages  {pool.total} of {format_bytes(pool.size)}, {pool.free} free")
    for kind, devices in (("gpu", topology.gpus), ("nic", topology.nics)):
        lines += [f"  {kind}         {_device(device)}" for device in devices if device.node == node.id]
    return lines


def _distance_lines(topology: Topology) -> list[str]:
    """The table as numactl -H prints it."""
    ids = [node.id for node in topology.nodes]
    lines = ["  node " + " ".join(f"{node:3d}" for node in ids)]
    for node in topology.nodes:
        lines.append(f"  {node.id:3d}: " + " ".join(f"{node.distances.get(other, 0):3d}" for other in ids))
    return lines


def _limit_lines(topology: Topology) -> list[str]:
    lines = [f"  affinity    CPUs {format_list(topology.affinity)}"]
    if topology.cpuset_cpus is not None:
        lines.append(f"  cpuset      CPUs {format_list(topology.cpuset_cpus)}")
    lines.append(f"  memory      nodes {format_list(topology.allowed_nodes) or 'none'} (Mems_allowed)")
    for limit in topology.memory_limits:
        size, left = format_bytes(limit.limit), format_bytes(limit.available)
        lines.append(f"  cgroup      {size} of memory, {left} left, in {limit.path}")
    if not topology.memory_limits:
        lines.append("  cgroup      no memory limit")
    if topology.cpu_quota is not None:
        lines.append(f"  cpu time    {topology.cpu_quota:g} CPUs")
    return lines


def _kernel_lines(topology: Topology) -> list[str]:
    kernel = topology.kernel
    return [
        f"  numa_balancing     {_bits(kernel.numa_balancing, _BALANCING_BITS)}",
        f"  zone_reclaim_mode  {_bits(kernel.zone_reclaim_mode, _RECLAIM_BITS)}",
        f"  huge pages         {kernel.thp_enabled or 'not supported'}",
        f"  shared memory      huge pages {kernel.thp_shmem or 'not supported'}",
    ]


def _bits(value: int | None, words: dict[int, str]) -> str:
    if value is None:
        return "not supported"
    meanings = [word for bit, word in words.items() if value & bit]
    return f"{value} ({', '.join(meanings) or 'off'})"


def _permission_line(permission: Permission) -> str:
    refused = permission.refused
    if refused is None:
        return f"  {permission.call:17}  permitted"
    name = errno.errorcode.get(refused.code, str(refused.code))
    return f"  {permission.call:17}  refused ({name}): {refused.reason}; {refused.remedy}"


def _device(device: PciDevice) -> str:
    parts: Iterable[str] = (
        device.address,
        f"{device.vendor} {device.device_id:04x}",
        f"driver {device.driver}" if device.driver else "no driver",
        *device.names,
    )
    return ", ".join(parts)


def _node_json(node: Node, topology: Topology) -> dict[str, Any]:
    return {
        "id": node.id,
        "has_cpu": node.has_cpu,
        "has_memory": node.has_memory,
        "cpus": list(node.cpus),
        "physical_cores": count_physical_cores(topology.cpu(cpu) for cpu in node.cpus),
        "memory": {
            "total_bytes": node.memory_total,
            "free_bytes": node.memory_free,
            "available_bytes": node.memory_available,
        },
        "huge_pages": [
            {"size_bytes": pool.size, "total": pool.total, "free": pool.free} for pool in node.huge_pages
        ],
        "distances": {str(other): distance for other, distance in node.distances.items()},
        "gpus": [device.address for device in topology.gpus if device.node == node.id],
        "nics": [device.address for device in topology.nics if device.node == node.id],
    }


def _device_json(device: PciDevice) -> dict[str, Any]:
    return {
        "address": device.address,
        "node": device.node,
        "vendor": device.vendor,
        "vendor_id": device.vendor_id,
        "device_id": device.device_id,
        "driver": device.driver,
        "names": list(device.names),
    }


def _permission_json(permission: Permission) -> dict[str, Any]:
    refused = permission.refused
    return {
        "call": permission.call,
        "permitted": permission.permitted,
        "errno": None if refused is None else errno.errorcode.get(refused.code, str(refused.code)),
        "reason": None if refused is None else refused.reason,
        "remedy": None if refused is None else refused.remedy,
    }
