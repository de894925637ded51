"""A running launcher over the toy service, for tests."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from served import LogWatcher

TESTS = Path(__file__).parent


class Toy:
    """A running launcher over toy_service."""

    def __init__(self, directory: Path, *counts: int, take_over: bool = False, **options: str) -> None:
        self.directory = directory
        self.runtime_dir = directory / "run"
        service_config = json.dumps({"directory": str(directory), **options})
        command = [sys.executable, str(TESTS / "toy_launcher.py"), str(self.runtime_dir), service_config]
        self.process = subprocess.Popen(
            [*command, *map(str, counts)],
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": f"{TESTS}:{TESTS.parent}",
                **({"TAKE_OVER": "1"} if take_over else {}),
            },
        )
        self.log = LogWatcher(self.process)

    def ask(self, worker: int) -> dict:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"{self.directory}/toy-{worker}.sock")
            return json.loads(connection.makefile().read())

    def loads(self) -> int:
        return len((self.directory / "loads").read_text().splitlines())

    def family(self) -> set[int]:
        """All processes of this server: each carries the folder's name in its command line or environment."""
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if str(self.process.pid) == (entry / "stat").read_text().rpartition(")")[2].split()[1]:
                        found.add(int(entry.name))
        return found
