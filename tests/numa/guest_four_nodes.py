"""Runs in a guest of 4 nodes x 1 CPU at uneven distances: guest_four_nodes.py OUT MODEL"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from guest_facts import REQUEST, Facts, describe_host, observe, plan, run_scenarios
from guest_preloaded import serve_preloaded
from served import Server

MODEL = sys.argv[2]


def replicate() -> Facts:
    """A unit on each node, and where requests go that meet a busy worker."""
    with serve_preloaded(MODEL) as server:
        return {**observe(server), "relayed": {worker: relay(server, worker) for worker in (0, 2)}}


def relay(server: Server, worker: int) -> Facts:
    """Who serves a long answer that one worker is asked for, and who the next request to that worker meanwhile."""
    with server.client(worker) as client:
        stream = client.stream("Hold on", max_tokens=400, temperature=0, ignore_eos=True)
        first = next(stream).served_by.worker
        second = client.infer(**REQUEST).served_by
        stream.close()
        return {"first": first, "second": second.worker, "nodes": list(second.nodes)}


def plans() -> Facts:
    """Workers that are fewer than the nodes, or not a multiple of them, and numactl's list syntax."""
    return {
        "three": plan(MODEL, "--workers=3"),
        "six": plan(MODEL, "--workers=6"),
        "not_0": plan(MODEL, "--nodes=!0"),
    }


if __name__ == "__main__":
    run_scenarios(Path(sys.argv[1]), {"describe_host": describe_host, "plans": plans, "replicate": replicate})
    # Leaving without tearing down: the guest ends with this process.
    os._exit(0)
