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


needs_guests = pytest.mark.skipif(
    numa_vm() is None or shutil.which("numactl") is None,
    reason="guests with several nodes need numactl and the tool numa-vm: set NUMA_VM to its path",
)


def run_in_guest(
    out: Path, options: list[str], program: str, *arguments: str, timeout: int
) -> dict[str, Any]:
    """Boot one guest, run `program` of this folder in it, return its facts by scenario."""
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
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    facts = out / "facts.json"
    assert facts.exists(), f"numa-vm ended with {done.returncode}:\n{done.stdout}"
    found: dict[str, Any] = json.loads(facts.read_text())
    print(done.stdout)
    return found
