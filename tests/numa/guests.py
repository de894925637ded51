"""Boots guests with several NUMA nodes and fetches what a program in them found out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Emulated CPUs are 10 to 30 times slower than real ones.
START_SECONDS = 400


def numa_vm() -> str | None:
    """The tool that boots them: $NUMA_VM, or the one beside this repository."""
    named = os.environ.get("NUMA_VM")
    beside = ROOT.parent / "shared" / "tools" / "numa-vm"
    return named or (str(beside) if beside.is_file() else None)


def _why_not() -> str:
    if numa_vm() is None:
        return "no tool that boots guests with several nodes: NUMA_VM is not set, and none is beside this repository"
    return "guests need numactl, which is not installed" if shutil.which("numactl") is None else ""


needs_guests = pytest.mark.skipif(bool(_why_not()), reason=_why_not())


def run_in_guest(
    out: Path, options: list[str], program: str, *arguments: str, timeout: int
) -> dict[str, Any]:
    """Boot one guest, run `program` of this folder in it, return its facts by scenario.

    What the guest says meanwhile is in `out`/guest.log.
    """
    tool = numa_vm()
    assert tool
    out.mkdir(exist_ok=True)
    # Nothing that a guest writes stays, so that each process in it would compile the sources anew.
    packages = [str(ROOT / package) for package in ("placement", "service", "numaserve", "tests")]
    subprocess.run([sys.executable, "-m", "compileall", "-q", *packages], check=True)
    command = [
        tool,
        *options,
        "--kernel-args=numa_balancing=disable",
        f"--timeout={timeout}",
        f"--out={out}",
        f"--env=NUMASERVE_TEST_START_SECONDS={START_SECONDS}",
        "--env=PYTHONDONTWRITEBYTECODE=1",
        "--env=OMP_WAIT_POLICY=passive",
        "--",
        sys.executable,
        str(HERE / program),
        str(out / "facts.json"),
        *arguments,
    ]
    log = out / "guest.log"
    with log.open("wb") as sink:
        done = subprocess.run(command, cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT, check=False)
    said = log.read_text(errors="replace")
    # A scenario that is not among the facts fails its tests; here it is said how far the guest came.
    print(f"numa-vm ended with {done.returncode}:\n{said}")
    facts = out / "facts.json"
    assert facts.exists(), f"numa-vm ended with {done.returncode}:\n{said}"
    found: dict[str, Any] = json.loads(facts.read_text())
    return found
