"""What this machine can do at most, measured by a small program that is compiled for it."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from service.kernels.build import find_compiler

SOURCE = Path(__file__).resolve().parent / "machine_limits.cpp"
# Far more than any cache that a few cores have to themselves.
_MEBIBYTES = 512
_ROUNDS = 6


@dataclass(frozen=True)
class MachineLimits:
    """Bytes per second of a plain read of memory, and fp32 operations per second of fused multiply-adds alone."""

    read_bytes: float
    operations: float


class LimitsProgram:
    """The compiled program; raises RuntimeError without a C++ compiler. To be closed."""

    def __init__(self, threads: int) -> None:
        compiler = find_compiler()
        if compiler is None:
            raise RuntimeError("no C++ compiler was found: set CXX, or install g++ or clang++")
        self._threads = threads
        self._folder = tempfile.TemporaryDirectory(prefix="numaserve-limits-")
        self._program = Path(self._folder.name, "machine_limits")
        flags = ["-std=c++17", "-O3", "-march=native", "-pthread"]
        subprocess.run([compiler, *flags, str(SOURCE), "-o", str(self._program)], check=True)

    def measure(self) -> MachineLimits:
        """The best of some rounds, which take about a second."""
        command = [str(self._program), str(self._threads), str(_MEBIBYTES), str(_ROUNDS)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        read_bytes, operations = map(float, done.stdout.split())
        return MachineLimits(read_bytes, operations)

    def close(self) -> None:
        """Removes the program."""
        self._folder.cleanup()
