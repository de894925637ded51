"""Runs in a guest of 2 nodes x 1 CPU and a third node without CPUs: guest_memory_only_node.py OUT MODEL"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from guest_facts import Facts, describe_host, observe, plan, run_scenarios
from guest_preloaded import serve_preloaded

MODEL = sys.argv[2]


def plans() -> Facts:
    """What happens unless the node is asked for, and when workers are asked for on it."""
    return {"default": plan(MODEL), "on_2": plan(MODEL, "--nodes=2")}


def membind() -> Facts:
    """The node's memory, asked for."""
    with serve_preloaded(MODEL, "--nodes=0", "--membind=2") as server:
        return observe(server)


if __name__ == "__main__":
    run_scenarios(Path(sys.argv[1]), {"describe_host": describe_host, "plans": plans, "membind": membind})
    # Leaving without tearing down: the guest ends with this process.
    os._exit(0)
