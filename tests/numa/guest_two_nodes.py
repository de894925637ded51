"""Runs in a guest of 2 nodes x 2 CPUs: guest_two_nodes.py OUT DEMO_MODEL MODEL [SCENARIO...]"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from guest_enter_cgroup import enter
from guest_facts import (
    Facts,
    describe_host,
    observe,
    pages_in_numa_maps,
    plan,
    run_scenarios,
    verify,
)
from guest_preloaded import serve_preloaded
from served import Server

from placement import numa
from placement.mapping import HUGE_PAGE, MADV_POPULATE_READ, Mapping
from placement.residency import pages_per_node

HERE = Path(__file__).parent
PAGE = 4096
MAIN = (sys.executable, "-m", "service.cli.main")
DEMO, MODEL = sys.argv[2], sys.argv[3]


def in_cgroup(settings: str) -> tuple[str, ...]:
    return (str(HERE / "guest_enter_cgroup.py"), settings, *MAIN)


def without_calls(calls: str) -> tuple[str, ...]:
    return (str(HERE.parent / "seccomp_deny.py"), calls, *MAIN)


def read_on_node(folder: str, node: int) -> dict[int, int]:
    """Read a checkpoint with a task of one node; returns the pages of its page cache by node."""
    path = Path(folder) / "model.safetensors"
    reader = ["numactl", f"--cpunodebind={node}", f"--membind={node}", "cat", str(path)]
    subprocess.run(reader, stdout=subprocess.DEVNULL, check=True)
    with path.open("rb") as file:
        mapping = Mapping.of_file(file.fileno(), path.stat().st_size, writable=False)
    assert mapping.advise(MADV_POPULATE_READ)
    pages = dict(pages_per_node(mapping.address, mapping.length).pages)
    mapping.close()
    return pages


@contextlib.contextmanager
def filled(*left: tuple[int, int]) -> Iterator[None]:
    """Other processes hold all but some MiB of some nodes' memory; `left` are pairs of node and MiB."""
    with contextlib.ExitStack() as stack:
        for node, mib in left:
            command = [sys.executable, str(HERE / "guest_fill_node.py"), str(node), str(mib)]
            filler = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(filler)
            stack.callback(filler.kill)
            assert filler.stdout
            assert "MiB taken" in filler.stdout.readline()
        yield


def wait_for_loader_half_way(pages: int) -> int:
    """The pid of a loader, which marks itself for the OOM killer, once so many pages of a segment are filled."""
    while True:
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and (entry / "oom_score_adj").read_text().strip() == "1000":
                    filled_pages = pages_in_numa_maps(int(entry.name), "/memfd:numaserve-weights-")
                    if sum(filled_pages.values()) >= pages:
                        return int(entry.name)
        time.sleep(0.01)


def demo() -> Facts:
    """The demo model."""
    with serve_preloaded(DEMO, "--max-model-len=256") as server:
        return observe(server)


def replicate() -> Facts:
    """A model that was read beforehand on node 1. One loader is killed half-way, and afterwards a worker."""
    cached = read_on_node(MODEL, 1)
    server = serve_preloaded(MODEL)
    os.kill(wait_for_loader_half_way(1000), signal.SIGKILL)
    with server:
        facts = observe(server)
        os.kill(server.status().workers[1].pid, signal.SIGKILL)
        server.log.wait_for("worker 1 serves again")
        after = observe(server)
        return {**facts, "page_cache": cached, "after_kill": after, "misplaced": misplace(server)}


def misplace(server: Server) -> Facts:
    """Pages of worker 0's cache and of its weights are moved to node 1 behind its back."""
    pid = server.status().workers[0].pid
    moved = [move_some(pid, 1, weights=False), move_some(pid, 1, weights=True)]
    return {"moved_away": moved, "verify": verify(server), "repair": verify(server, "--repair")}


def move_some(pid: int, node: int, weights: bool) -> int:
    """Move 8 pages of a process's weights, or of its bound private memory; returns how many went."""
    for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
        wanted = "/memfd:numaserve-weights-" in line if weights else " bind" in line and " file=" not in line
        if wanted and " N0=" in line:
            # The first 2 MiB of a segment are its manifest.
            start = int(line.split()[0], 16) + (HUGE_PAGE if weights else 0)
            pages = range(start, start + 8 * PAGE, PAGE)
            moved = numa.move_pages(pages, [node] * 8, pid, numa.MPOL_MF_MOVE_ALL)
            return sum(status == node for status in moved)
    return 0


def refused_calls() -> Facts:
    """Calls that a container refuses, with the page cache on the wrong node for node 0."""
    cached = read_on_node(MODEL, 1)
    with serve_preloaded(MODEL, program=without_calls("mbind,set_mempolicy,move_pages")) as server:
        return {**observe(server), "page_cache": cached}


def shared_files() -> Facts:
    """Weights in the checkpoint's own page cache, which lies on the wrong node at first."""
    cached = read_on_node(MODEL, 1)
    with serve_preloaded(MODEL, "--placement=shared", "--nodes=0") as server:
        return {**observe(server, "model.safetensors"), "page_cache": cached}


def cpuset() -> Facts:
    """One node's CPUs and memory."""
    with serve_preloaded(MODEL, program=in_cgroup("cpuset.cpus=2-3,cpuset.mems=1")) as server:
        return observe(server)


def memory_limit() -> Facts:
    """A limit of the control group below what serving takes."""
    enter({"memory.max": "300M"})
    return plan(MODEL)


def interleave() -> Facts:
    """Each node has room for half of the weights but not for all of them."""
    # A cache that is planned for and hardly touched: what it does not take keeps the libraries' pages in memory.
    large_cache = f"--kv-cache-memory={CACHE_MIB}MiB"
    with filled((0, ROOM_MIB), (1, ROOM_MIB)), serve_preloaded(MODEL, large_cache) as server:
        return observe(server)


def node_filled_while_loading() -> Facts:
    """Another process takes the node's memory while a loader, which was planned with it, stands still half-way."""
    server = serve_preloaded(MODEL, "--nodes=1")
    loader = wait_for_loader_half_way(2000)
    os.kill(loader, signal.SIGSTOP)
    with filled((1, 40)):
        os.kill(loader, signal.SIGCONT)
        status = server.process.wait()
        log = server.log.finish()
    return {"status": status, "log": log.splitlines()}


# A copy takes 82 MB of weights, 256 of its unit, 120 of its worker and the cache, and 105 stay free; half a copy 167 less.
CACHE_MIB = 404
ROOM_MIB = 476 + CACHE_MIB

if __name__ == "__main__":
    every = {
        function.__name__: function
        for function in (
            describe_host,
            memory_limit,
            replicate,
            refused_calls,
            shared_files,
            cpuset,
            interleave,
            node_filled_while_loading,
            demo,
        )
    }
    chosen = sys.argv[4:] or list(every)
    run_scenarios(Path(sys.argv[1]), {name: every[name] for name in chosen})
    # Leaving without tearing down: the guest ends with this process.
    sys.stderr.flush()
    os._exit(0)
