"""A plan as an operator reads it, and as JSON."""

from __future__ import annotations

from typing import Any

from placement.cpulist import format_list
from placement.plan import Plan, UnitPlan, WorkerPlan
from placement.sizes import format_bytes


def plan_lines(plan: Plan) -> list[str]:
    """The plan in words: policy, units and their workers, bytes per node, notes, refusals."""
    lines = []
    if not plan.refusals:
        lines.append(f"policy   {plan.policy.value}: {plan.policy_reason}")
    for unit in plan.units:
        lines.append("")
        lines.extend(_unit_lines(unit))
    if plan.units:
        lines.append("")
        lines.extend(_memory_lines(plan))
    lines += [f"note     {note}" for note in plan.notes]
    lines += [f"refused  {refusal.subject}: {refusal.reason}" for refusal in plan.refusals]
    return lines


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as the `plan` object of docs/topology-schema.md."""
    return {
        "policy": plan.policy.value,
        "policy_reason": plan.policy_reason,
        "units": [
            {
                "name": unit.name,
                "nodes": list(unit.nodes),
                "memory_nodes": list(unit.memory_nodes),
                "cpus": list(unit.cpus),
                "weights_bytes": unit.weights_bytes,
                "workers": [_worker_json(worker) for worker in unit.workers],
            }
            for unit in plan.units
        ],
        "refusals": [{"subject": refusal.subject, "reason": refusal.reason} for refusal in plan.refusals],
        "notes": list(plan.notes),
    }


def _unit_lines(unit: UnitPlan) -> list[str]:
    weights = f", {format_bytes(unit.weights_bytes)} of weights" if unit.weights_bytes else ""
    where = f"memory on {_nodes(unit.memory_nodes)}"
    lines = [f"unit {unit.name}: CPUs {format_list(unit.cpus)}, {where}{weights}"]
    for worker in unit.workers:
        threads = f"{worker.compute_threads} compute thread{'s' if worker.compute_threads != 1 else ''}"
        kv_cache = ""
        if worker.kv_cache_bytes:
            kv_cache = f", KV cache {format_bytes(worker.kv_cache_bytes)} on {_nodes(worker.memory_nodes)}"
        lines.append(f"  worker {worker.index}: CPUs {format_list(worker.cpus)}, {threads}{kv_cache}")
    return lines


def _memory_lines(plan: Plan) -> list[str]:
    """Bytes of weights and KV cache per set of nodes that holds them."""
    totals: dict[tuple[int, ...], list[int]] = {}
    for unit in plan.units:
        totals.setdefault(unit.memory_nodes, [0, 0])[0] += unit.weights_bytes
        for worker in unit.workers:
            totals.setdefault(worker.memory_nodes, [0, 0])[1] += worker.kv_cache_bytes
    return [
        f"memory   {_nodes(nodes)}: {format_bytes(weights)} of weights, {format_bytes(kv_cache)} of KV cache"
        for nodes, (weights, kv_cache) in sorted(totals.items())
        if weights or kv_cache
    ]


def _worker_json(worker: WorkerPlan) -> dict[str, Any]:
    return {
        "index": worker.index,
        "cpus": list(worker.cpus),
        "compute_threads": worker.compute_threads,
        "kv_cache_bytes": worker.kv_cache_bytes,
        "memory_nodes": list(worker.memory_nodes),
    }


def _nodes(nodes: tuple[int, ...]) -> str:
    return f"node{'s' if len(nodes) != 1 else ''} {format_list(nodes)}"
