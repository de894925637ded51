"""systemd's part in a restart, as far as sd_notify(3) and sd_listen_fds(3) go: a notify socket and a descriptor store."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from served import Server

# Moves the passed descriptors to 3 and on, and becomes the server with its pid in LISTEN_PID.
_BOOTSTRAP = """
import os, sys
passed = [os.dup(int(fd)) for fd in os.environ.pop("PASSED").split(",") if fd]
passed = [os.dup2(fd, 100 + number) for number, fd in enumerate(passed)]
for number, fd in enumerate(passed):
    os.dup2(fd, 3 + number)
os.environ["LISTEN_PID"], os.environ["LISTEN_FDS"] = str(os.getpid()), str(len(passed))
os.execv(sys.executable, [sys.executable, "-m", "service.cli.main", *sys.argv[1:]])
"""


class FakeServiceManager:
    """Listens on a notify socket, and keeps what it is told to keep."""

    def __init__(self, directory: Path) -> None:
        self.address = str(directory / "notify.sock")
        self.assignments: list[str] = []
        self.store: dict[str, int] = {}
        self._news = threading.Condition()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 16, 8)
            lines = data.decode().split("\n")
            name = next((line[7:] for line in lines if line.startswith("FDNAME=")), "")
            with self._news:
                if "FDSTORE=1" in lines:
                    (self.store[name],) = descriptors
                if "FDSTOREREMOVE=1" in lines and name in self.store:
                    os.close(self.store.pop(name))
                self.assignments += lines
                self._news.notify_all()

    def wait_for_state(self, generation: int, only: bool = False) -> None:
        """Wait until a generation is in the store; with `only`, until nothing else is."""

        def stored() -> bool:
            names = list(self.store)
            mine = [name for name in names if name.split("-")[2] == str(generation)]
            return f"numaserve-state-{generation}" in mine and (not only or mine == names)

        with self._news:
            assert self._news.wait_for(stored, 60), f"the store holds {list(self.store)}"

    def start(self, model: Path, runtime_dir: Path, *flags: str) -> Server:
        """A server under this manager, with all that is in the store."""
        return _Managed(self, model, runtime_dir, *flags)


class _Managed(Server):
    def __init__(self, manager: FakeServiceManager, model: Path, runtime_dir: Path, *flags: str) -> None:
        self._manager = manager
        super().__init__(model, runtime_dir, *flags)

    def _start(self, program: tuple[str, ...], arguments: list[str]) -> subprocess.Popen[str]:  # noqa: ARG002
        store = dict(self._manager.store)
        return subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, *arguments],
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=list(store.values()),
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "NOTIFY_SOCKET": self._manager.address,
                "PASSED": ",".join(map(str, store.values())),
                "LISTEN_FDNAMES": ":".join(store),
            },
        )
