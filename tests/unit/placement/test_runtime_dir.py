"""The folder of a running server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from placement.runtime_dir import (
    RuntimeDir,
    RuntimeDirBusy,
    default_runtime_dir,
    runtime_dir_of,
)


def test_a_folder_in_use_is_refused_and_a_released_one_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "50051"
    held = RuntimeDir(path)
    assert path.stat().st_mode & 0o777 == 0o700
    attempt = (
        f"from placement.runtime_dir import *\nfrom pathlib import Path\nRuntimeDir(Path({str(path)!r}))"
    )
    other = subprocess.run([sys.executable, "-c", attempt], capture_output=True, text=True, check=False)
    assert "is used by a running server" in other.stderr
    held.release()
    assert not path.exists()


def test_what_a_killed_server_left_is_cleaned(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    (tmp_path / "worker-0.sock").touch()
    RuntimeDir(tmp_path).release()
    assert not tmp_path.exists()


def test_a_folder_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(RuntimeDirBusy, match="belongs to another user"):
        RuntimeDir(tmp_path)


def test_the_default_is_per_user_and_per_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_runtime_dir(50051) == Path("/run/user/7/numaserve/50051")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("os.getuid", lambda: 7)
    assert default_runtime_dir(1).parts[-2:] == ("numaserve-7", "1")


def test_the_folder_is_found_by_the_pid_that_holds_it(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="not the launcher"):
        runtime_dir_of(os.getpid())
    holder = RuntimeDir(tmp_path / "run")
    assert runtime_dir_of(os.getpid()) == tmp_path / "run"
    holder.release()
    with pytest.raises(LookupError, match="No such file"):
        runtime_dir_of(2**22 - 1)
