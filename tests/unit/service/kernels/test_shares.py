"""How a team of threads shares work out while it does it."""

import subprocess
from pathlib import Path

import pytest

from service.kernels.build import SOURCES, find_compiler

PROGRAM = Path(__file__).with_name("shares_check.cpp")


def test_every_unit_is_taken_once_whichever_thread_is_late(tmp_path: Path) -> None:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    program = tmp_path / "shares_check"
    flags = ["-std=c++17", "-O2", "-pthread", f"-I{SOURCES}"]
    subprocess.run([compiler, *flags, PROGRAM, SOURCES / "pool.cpp", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
