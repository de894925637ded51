"""Builds the native kernels: one shared library, with an object file for each instruction set that the compiler knows.

`python -m service.kernels.build` builds next to the sources. Which instruction set is used is decided when the library is
loaded, so that one build serves every machine of an architecture. Needs a C++17 compiler and nothing of Python.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
LIBRARY = SOURCES / "_numaserve_kernels.so"
# Contraction would make results depend on what a compiler happens to fuse; fused multiply-adds are written out.
FLAGS = (
    "-std=c++17",
    "-O3",
    # A few percent, without which any change of one function moves all others.
    "-falign-loops=64",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-exceptions",
    "-fno-rtti",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-unused-function",
    # GCC's own AVX-512 headers set them off.
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
    # clang knows not all of these.
    "-Wno-unknown-warning-option",
)
COMMON = ("pool.cpp", "checks.cpp", "run.cpp", "pack.cpp", "selection.cpp")


class BuildError(Exception):
    """The compiler refused a source file; the message holds what it said."""


@dataclass(frozen=True)
class InstructionSet:
    """One object file: its source, the flags it needs, and the macro that tells the dispatcher of it."""

    source: str
    macro: str
    flags: tuple[str, ...]


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
X86_SETS = (
    InstructionSet("isa_avx2.cpp", "NUMASERVE_WITH_AVX2", _AVX2),
    InstructionSet("isa_avx512.cpp", "NUMASERVE_WITH_AVX512", _AVX512),
    InstructionSet(
        "isa_amx.cpp", "NUMASERVE_WITH_AMX", (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16")
    ),
)


def find_compiler() -> str | None:
    """The C++ compiler: $CXX, else the first of c++, g++ and clang++ that is installed; None where there is none."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((path for path in map(shutil.which, names) if path), None)


def build(
    target: Path = LIBRARY,
    compiler: str | None = None,
    machine: str | None = None,
    flags: Sequence[str] = (),
) -> Path:
    """Compiles and links the library; returns `target`.

    `machine` is the architecture that the compiler makes code for (by default this one's), `flags` are added to all others.
    Raises BuildError where there is no compiler or it fails; the old library, if any, is then still there.
    """
    compiler = compiler or find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler was found: set CXX, or install g++ or clang++")
    sets = supported_sets(compiler, machine or platform.machine())
    with tempfile.TemporaryDirectory(prefix="numaserve-kernels-") as folder:
        macros = [f"-D{each.macro}" for each in sets]
        jobs: list[tuple[str, Sequence[str]]] = [(each.source, each.flags) for each in sets]
        jobs += [("dispatch.cpp", macros), ("isa_generic.cpp", ()), *((source, ()) for source in COMMON)]

        def compile_one(job: tuple[str, Sequence[str]]) -> str:
            source, own = job
            output = str(Path(folder, source).with_suffix(".o"))
            _run([compiler, *FLAGS, *own, *flags, "-c", str(SOURCES / source), "-o", output])
            return output

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, jobs))
        linked = Path(folder, "library.so")
        _run([compiler, "-shared", "-pthread", "-Wl,-z,defs", *flags, *objects, "-o", str(linked)])
        # A process that has the old file mapped keeps it: the name is given to the new one in a single step.
        staged = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copy(linked, staged)
        staged.replace(target)
    return target


def is_current(target: Path = LIBRARY) -> bool:
    """Whether the library is there and no source is newer."""
    sources = [path for path in SOURCES.iterdir() if path.suffix in (".cpp", ".h")]
    return target.exists() and all(path.stat().st_mtime <= target.stat().st_mtime for path in sources)


def supported_sets(compiler: str, machine: str) -> list[InstructionSet]:
    """The instruction sets of the architecture whose flags the compiler knows."""
    if machine not in ("x86_64", "AMD64"):
        return []
    return [each for each in X86_SETS if _accepts(compiler, each.flags)]


def _accepts(compiler: str, flags: Sequence[str]) -> bool:
    command = [compiler, *flags, "-x", "c++", "-fsyntax-only", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stderr.strip()}")
    if done.stderr:
        sys.stderr.write(done.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Builds as the command line says; 1 where the build failed."""
    parser = argparse.ArgumentParser(prog="python -m service.kernels.build", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=LIBRARY, help="the library to write (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        print(build(options.output))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
