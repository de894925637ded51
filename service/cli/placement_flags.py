"""The placement flags that `serve` and `plan` share, in numactl's words."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from placement import sizes as byte_sizes
from placement.plan import PlanRequest, Policy

if TYPE_CHECKING:
    from service.loader.model_size import ModelSizes


def add_placement_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that decide where workers and memory go."""
    group = parser.add_argument_group(
        "placement",
        "NODES and CPUS are lists as in numactl(8): 0,2-3  all  !0  +0 (relative to the cpuset)  0-6:2",
    )
    group.add_argument("--nodes", metavar="NODES", help="nodes that house workers")
    group.add_argument("--cpunodebind", "-N", metavar="NODES", help="run on the CPUs of these nodes")
    group.add_argument("--membind", "-m", metavar="NODES", help="allocate memory on these nodes alone")
    group.add_argument(
        "--interleave", "-i", metavar="NODES", help="spread one copy of the weights over these nodes"
    )
    group.add_argument("--physcpubind", "-C", metavar="CPUS", help="run on these CPUs alone")
    workers = group.add_mutually_exclusive_group()
    workers.add_argument(
        "--workers-per-node", type=int, metavar="N", help="default: one for every 8 cores, at most 4"
    )
    workers.add_argument("--workers", type=int, metavar="N", help="workers in all, spread over the nodes")
    group.add_argument(
        "--threads-per-worker",
        type=int,
        metavar="N",
        help="default: its physical cores, less one for the event loop",
    )
    group.add_argument(
        "--placement",
        choices=("auto", *(policy.value for policy in Policy)),
        default="auto",
        help="how weights lie: a copy per node, one over all nodes, or the checkpoint's files themselves (default: auto)",
    )
    group.add_argument(
        "--kv-cache-memory", type=parse_size, metavar="SIZE", help="KV cache per worker, such as 512MiB or 2G"
    )


def parse_size(text: str) -> int:
    """Bytes in `512MiB`, `2G` or `1048576`, as a type for argparse. Raises ArgumentTypeError."""
    try:
        return byte_sizes.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def plan_request_from(args: argparse.Namespace, sizes: ModelSizes) -> PlanRequest:
    """The request that parsed flags and a model's sizes make.

    `args` also holds `block_size` (tokens per KV block) and `max_model_len` (0: the model's context length).
    """
    context_length = args.max_model_len or sizes.context_length
    return PlanRequest(
        weights_bytes=sizes.weights_bytes,
        kv_block_bytes=sizes.kv_block_bytes,
        min_kv_blocks=-(-context_length // args.block_size),
        placement=args.placement,
        workers_per_node=args.workers_per_node,
        workers=args.workers,
        threads_per_worker=args.threads_per_worker,
        kv_cache_bytes=args.kv_cache_memory,
        nodes=args.nodes,
        cpunodebind=args.cpunodebind,
        membind=args.membind,
        interleave=args.interleave,
        physcpubind=args.physcpubind,
        shared_obstacle=sizes.shared_obstacle,
    )
