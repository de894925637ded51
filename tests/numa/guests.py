"""Boots guests with several NUMA nodes and fetches what a program in them found out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Guest:
    """A virtual machine and the program of this folder that runs in it, with models' folders after its output file.

    It ends after `timeout` seconds. `demo` adds the demo model before the guests' own model.
    """

    name: str
    options: tuple[str, ...]
    program: str
    timeout: int
    demo: bool = False


def run_in_guest(guest: Guest, out: Path, models: list[Path]) -> tuple[dict[str, Any], str]:
    """Boot one guest; returns its program's facts by scenario, and what the guest said meanwhile.

    That is also in `out`/guest.log while it runs. Raises AssertionError when no scenario came to an end.
    """
    tool = numa_vm()
    assert tool
    command = [
        tool,
        *guest.options,
        "--kernel-args=numa_balancing=disable",
        f"--timeout={guest.timeout}",
        f"--out={out}",
        f"--env=NUMASERVE_TEST_START_SECONDS={START_SECONDS}",
        "--env=PYTHONDONTWRITEBYTECODE=1",
        "--env=OMP_WAIT_POLICY=passive",
        "--",
        sys.executable,
        str(HERE / guest.program),
        str(out / "facts.json"),
        *map(str, models),
    ]
    log = out / "guest.log"
    with log.open("wb") as sink:
        done = subprocess.run(command, cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT, check=False)
    said = f"numa-vm ended with {done.returncode}:\n{log.read_text(errors='replace')}"
    facts = out / "facts.json"
    assert facts.exists(), said
    return json.loads(facts.read_text()), said


def compile_sources() -> None:
    """Nothing that a guest writes stays, so that each process in it would compile the sources anew."""
    packages = [str(ROOT / package) for package in ("placement", "service", "numaserve", "tests")]
    subprocess.run([sys.executable, "-m", "compileall", "-q", *packages], check=True)
