"""What the programs that run inside a guest share: scenarios, and facts about a server taken from the kernel itself.

A program serves a model, looks at it and writes what it saw as JSON; the tests on the host judge that.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from guest_fork import in_fork
from served import Server

import service.cli.main
from numaserve import Client

Facts = dict[str, Any]

# One token from a short prompt: emulated arithmetic is several hundred times slower than real.
REQUEST = {"prompt": "Hi", "max_tokens": 1, "temperature": 0, "ignore_eos": True, "timeout": 900}
SMALL_CACHE = "--kv-cache-memory=4MiB"
# Threads that wait for each other by spinning take the emulated CPUs that the others need.
ONE_THREAD = "--threads-per-worker=1"


def run_scenarios(out: Path, scenarios: dict[str, Callable[[], Facts]]) -> None:
    """Run each scenario and write `out` after each; what one raises is its fact `error`, and the others still run.

    Each has a process of its own, forked while there is one thread, so that it can fork servers.
    """
    found: dict[str, Facts] = {}
    # Where a node is filled up, the kernel is to take a process of the server.
    Path("/proc/self/oom_score_adj").write_text("-1000")
    say("everything is imported")
    for name, scenario in scenarios.items():
        started = time.monotonic()
        found[name] = in_fork(lambda scenario=scenario: _facts_of(scenario))  # type: ignore[misc]
        found[name]["seconds"] = round(time.monotonic() - started, 1)
        say(f"{name} took {found[name]['seconds']} s")
        out.write_text(json.dumps(found, indent=1))


def _facts_of(scenario: Callable[[], Facts]) -> Facts:
    try:
        return scenario()
    except Exception:
        return {"error": traceback.format_exc()}


def serve(model: str, *flags: str, program: tuple[str, ...] = (), kind: type[Server] = Server) -> Server:
    """A server with a small KV cache and a runtime folder of its own."""
    runtime_dir = Path(tempfile.mkdtemp()) / "run"
    # A worker that asks itself for a token takes seconds here, and touches pages between two counts of them.
    quiet = "--self-request-interval=0"
    return kind(
        Path(model),
        runtime_dir,
        SMALL_CACHE,
        ONE_THREAD,
        "--workers-per-node=1",
        quiet,
        *flags,
        program=program,
    )


def numaserve(*arguments: str) -> tuple[int, str]:
    """Exit status and standard output of one command, run in this process: a new interpreter takes seconds here."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = service.cli.main.main(list(arguments))
    return status, output.getvalue()


def describe_host() -> Facts:
    """Our reading of the host, and numactl's."""
    numactl = subprocess.run(["numactl", "-H"], capture_output=True, text=True, check=True).stdout
    nodes = {
        int(node): {"cpus": [int(cpu) for cpu in cpus.split()], "mib": int(size)}
        for node, cpus, size in re.findall(r"node (\d+) cpus:(.*)\nnode \1 size: (\d+) MB", numactl)
    }
    table = re.findall(r"^ +(\d+): +([\d ]+)$", numactl, re.MULTILINE)
    distances = {int(node): [int(distance) for distance in row.split()] for node, row in table}
    status, text = numaserve("topology", "--json")
    return {"numactl": nodes, "distances": distances, "status": status, "topology": json.loads(text)}


def plan(model: str, *flags: str) -> Facts:
    """Exit status and JSON of `numaserve plan`."""
    status, text = numaserve("plan", f"--model={model}", "--json", SMALL_CACHE, *flags)
    return {"status": status, "plan": json.loads(text)}


def observe(server: Server, weights: str = "/memfd:numaserve-weights-") -> Facts:
    """Ask every worker once, then look at each process through /proc, and let the server judge itself.

    `weights` is in the path of the mappings that hold them.
    """
    say("looking at the server")
    status = server.status()
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(ask, [worker.address for worker in status.workers]))
    say("asked every worker")
    verification = verify(server)
    status = server.status()
    say("looked at the server")
    return {
        "policy": status.placement_policy,
        "reason": status.placement_reason,
        "segments": [
            {
                "unit": segment.unit,
                "nodes": list(segment.nodes),
                "verdict": segment.verdict,
                "explanation": segment.explanation,
                "pages": {entry.node: entry.pages for entry in segment.pages},
            }
            for segment in status.segments
        ],
        "workers": [
            {
                "worker": worker.worker,
                "unit": worker.unit,
                "cpus": list(worker.cpus),
                "thread_cpus": thread_cpus(worker.pid),
                "kv_nodes": list(worker.kv_nodes),
                "kv_verdict": worker.kv_verdict,
                "kv_explanation": worker.kv_explanation,
                "kv_pages": {entry.node: entry.pages for entry in worker.kv_pages},
                "weights_in_numa_maps": pages_in_numa_maps(worker.pid, weights),
                "bound_anonymous_in_numa_maps": pages_in_numa_maps(worker.pid, " bind"),
                "answer": answers[worker.worker],
                "restarts": worker.restarts,
            }
            for worker in status.workers
        ],
        "verify": verification,
        "log": [line["message"] for line in server.log.lines],
    }


def ask(address: str) -> Facts:
    """What one worker answered."""
    with Client(address) as client:
        answer = client.infer(**REQUEST)
        return {"tokens": len(answer.token_ids), "nodes": list(answer.served_by.nodes)}


def verify(server: Server, *flags: str) -> Facts:
    """Exit status and answer of `numaserve verify`."""
    status, text = numaserve("verify", str(server.process.pid), "--json", *flags)
    return {"status": status, **json.loads(text)}


def say(words: str) -> None:
    """Progress, for whoever waits."""
    print(f"{time.monotonic():7.1f} {words}", file=sys.stderr, flush=True)


def thread_cpus(pid: int) -> list[str]:
    """The distinct CPU lists that the threads of a process may run on."""
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        match = re.search(r"^Cpus_allowed_list:\s*(\S+)$", (task / "status").read_text(), re.MULTILINE)
        assert match
        found.add(match[1])
    return sorted(found)


def pages_in_numa_maps(pid: int, contains: str) -> dict[int, int]:
    """Pages per node of the mappings whose line of numa_maps contains a text; " bind" stands for bound anonymous ones."""
    pages: Counter[int] = Counter()
    for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
        if contains in line and (contains != " bind" or " file=" not in line):
            size = re.search(r"kernelpagesize_kB=(\d+)", line)
            factor = int(size[1]) // 4 if size else 1
            for node, count in re.findall(r"\bN(\d+)=(\d+)", line):
                pages[int(node)] += int(count) * factor
    return dict(pages)
