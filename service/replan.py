"""Plans the next generation of a running server: new weights, or another number of workers. Imports no torch.

Everything is planned as if the old generation were gone, as a fresh start would; then it is checked that both fit for
as long as they overlap, in which new KV caches hold little yet.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from placement.file_segment import AnySegment
from placement.orders import Planned, PlanOrder, PlanRefused
from placement.permissions import probe_permissions
from placement.plan import Plan, PlanRequest, make_plan
from placement.plan_codec import plan_to_json
from placement.residency import process_memory
from placement.segment import MEMFD_PREFIX
from placement.topology import Topology, read_topology
from service.adoption import model_files
from service.config import ServiceConfig
from service.loader.checkpoint import CheckpointError
from service.loader.hub import ModelNotFound, resolve_model
from service.loader.model_size import ModelSizes, measure, measure_segment
from service.models.config import ConfigError


def request_to_json(request: PlanRequest) -> str:
    """For LauncherConfig.plan_request."""
    return json.dumps(asdict(request))


def absolute_if_folder(name: str) -> str:
    """A folder's absolute path, its symbolic links kept; any other name as it is."""
    return os.path.abspath(name) if Path(name).is_dir() else name


def check_tokenizer(model_dir: Path) -> None:
    """Raises ValueError when the folder has no tokenizer; its contents are checked before any worker starts."""
    if not (model_dir / "tokenizer.json").is_file():
        raise ValueError(f"{model_dir / 'tokenizer.json'}: there is no such file")


def replan(order: PlanOrder, segments: Sequence[AnySegment]) -> Planned | PlanRefused:
    """The planning function of `numaserve serve`; `plan_request` is the first start's PlanRequest.

    With `segments`, which stay in use, no weights file is opened.
    """
    service = ServiceConfig.from_json(order.service_config)
    field = "model_dir" if order.model_dir else ""
    # A symbolic link is followed anew each time: it may lead to newer weights by now.
    asked = order.model_dir or service.asked_model or service.model_dir
    try:
        if segments:
            model_dir = Path(service.model_dir)
            sizes = measure_segment(model_dir, segments[0], service.kv_cache_dtype, service.block_size)
        else:
            model_dir = resolve_model(asked)
            sizes = measure(
                model_dir,
                service.dtype,
                service.kv_cache_dtype,
                service.block_size,
                service.backend,
                service.quantization,
            )
            check_tokenizer(model_dir)
        context = _context_length(service, sizes)
    except (ValueError, ModelNotFound, CheckpointError, ConfigError) as error:
        reason = str(error).removeprefix("--model ")
        return PlanRefused("INVALID_ARGUMENT" if field else "FAILED_PRECONDITION", field, reason)
    if order.workers < 0 or (order.workers == 0 and order.policy):
        return PlanRefused("INVALID_ARGUMENT", "workers", f"must be 1 or more, not {order.workers}")
    request = _request(order, sizes, context, service.block_size)
    plan = plan_beside(
        request,
        stays=summed(order.kept_bytes),
        goes=summed(order.freed_bytes) + memory_of_processes(order.processes),
    )
    if plan.refusals:
        text = "; ".join(f"{refusal.subject}: {refusal.reason}" for refusal in plan.refusals)
        return PlanRefused("RESOURCE_EXHAUSTED", "", text)
    config = replace(
        service, model_dir=str(model_dir), asked_model=absolute_if_folder(asked), max_context_length=context
    )
    return Planned(plan_to_json(plan), config.to_json(), str(model_dir), model_files(model_dir))


def plan_beside(request: PlanRequest, stays: Counter[int], goes: Counter[int]) -> Plan:
    """A plan for a server that follows one that still runs; what does not fit is in its `refusals`.

    `stays` are bytes by node of segments that the new one goes on using, `goes` those that the old one gives back.
    """
    topology = read_topology()
    plan = make_plan(request, _with_more(topology, stays + goes), probe_permissions())
    if plan.refusals:
        return plan
    overlap = make_plan(_during_overlap(request, plan), _with_more(topology, stays))
    refusals = tuple(
        replace(refusal, subject=f"{refusal.subject}, beside what runs") for refusal in overlap.refusals
    )
    return replace(plan, refusals=refusals)


def _context_length(service: ServiceConfig, sizes: ModelSizes) -> int:
    if service.asked_context_length > sizes.context_length:
        raise ValueError(
            f"--max-model-len {service.asked_context_length}: the model's context length is {sizes.context_length}"
        )
    return service.asked_context_length or sizes.context_length


def _request(order: PlanOrder, sizes: ModelSizes, context: int, block_size: int) -> PlanRequest:
    request = replace(
        PlanRequest(**json.loads(order.plan_request)),
        weights_bytes=sizes.weights_bytes,
        kv_block_bytes=sizes.kv_block_bytes,
        min_kv_blocks=-(-context // block_size),
    )
    if order.workers:
        request = replace(request, workers=order.workers, workers_per_node=None)
    if order.policy and request.interleave is None:
        request = replace(request, placement=order.policy)
    return request


def _during_overlap(request: PlanRequest, plan: Plan) -> PlanRequest:
    """The same layout with caches that hold one request of full length, or all that they can if that is less."""
    workers = [worker for unit in plan.units for worker in unit.workers]
    least = max(1, request.kv_block_bytes) * max(1, request.min_kv_blocks)
    return replace(
        request,
        placement=request.placement if request.interleave is not None else plan.policy.value,
        workers=len(workers),
        workers_per_node=None,
        kv_cache_bytes=min([least, *(worker.kv_cache_bytes for worker in workers)]),
    )


def summed(pairs: Iterable[tuple[int, int]]) -> Counter[int]:
    """Bytes by node."""
    sums: Counter[int] = Counter()
    for node, size in pairs:
        sums[node] += size
    return sums


def memory_of_processes(processes: Iterable[tuple[int, tuple[int, ...]]]) -> Counter[int]:
    """What processes that go, as (pid, memory nodes), will give back by node, weights left out."""
    sums: Counter[int] = Counter()
    for pid, nodes in processes:
        try:
            memory = process_memory(pid, MEMFD_PREFIX)
        except OSError:
            continue
        for node in nodes:
            sums[node] += (memory.pss - memory.weights_pss) // len(nodes)
    return sums


def _with_more(topology: Topology, more: Counter[int]) -> Topology:
    """The host as if so many bytes more were available on each node, and in the control groups in all."""
    return replace(
        topology,
        nodes=tuple(
            replace(node, memory_available=node.memory_available + more[node.id]) for node in topology.nodes
        ),
        memory_limits=tuple(
            replace(limit, usage=limit.usage - more.total()) for limit in topology.memory_limits
        ),
    )
