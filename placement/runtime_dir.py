"""The folder that holds a running server's unix sockets: one per port, private to its user, locked while in use."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_LOCK_NAME = "lock"


class RuntimeDirBusy(RuntimeError):
    """Another server uses the folder."""


def default_runtime_dir(port: int) -> Path:
    """Where a server on `port` keeps its sockets unless told otherwise: under XDG_RUNTIME_DIR, else the temporary folder."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    root = Path(base) / "numaserve" if base else Path(tempfile.gettempdir()) / f"numaserve-{os.getuid()}"
    return root / str(port)


def control_socket(runtime_dir: Path) -> Path:
    """The socket of the Control service."""
    return runtime_dir / "control.sock"


def runtime_dir_of(pid: int, procfs: Path = Path("/proc")) -> Path:
    """The folder that the launcher with this pid holds. Raises LookupError for any other process."""
    try:
        for descriptor in (procfs / str(pid) / "fd").iterdir():
            try:
                target = Path(os.readlink(descriptor))
            except FileNotFoundError:
                # Closed since the folder was listed.
                continue
            if target.name == _LOCK_NAME:
                return target.parent
    except OSError as error:
        raise LookupError(f"pid {pid}: {error.strerror}") from None
    raise LookupError(f"pid {pid} is not the launcher of a server")


class RuntimeDir:
    """The folder while it is held. A folder left by a server that was killed is cleaned and taken over.

    `lock` is a descriptor of the lock that a running server has passed on: both hold it then, and the folder is left
    alone at the end unless it is `owned`.
    """

    def __init__(self, path: Path, lock: int = -1) -> None:
        self.path = path
        self.owned = lock < 0
        if lock >= 0:
            self.lock = lock
            return
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.stat().st_uid != os.getuid():
            raise RuntimeDirBusy(f"--runtime-dir {path} belongs to another user")
        self.lock = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.lock)
            raise RuntimeDirBusy(
                f"--runtime-dir {path} is used by a running server; --take-over upgrades it in place"
            ) from None
        for stale in path.glob("*.sock"):
            stale.unlink()

    def release(self) -> None:
        """Remove the folder, if it is owned, and give up the lock."""
        if self.owned:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)
