"""A real `numaserve serve` process for end-to-end tests."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import numaserve
from numaserve.v1 import control_pb2
from service.cli.status import fetch_status

START_SECONDS = float(os.environ.get("NUMASERVE_TEST_START_SECONDS", "120"))


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that only waits to be reaped has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until_gone(pids: Iterable[int], timeout: float = 30) -> None:
    """Wait for processes that are nobody's children here; fails when one lives on."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([descriptor], [], [], timeout)[0], f"process {pid} lives on"
        os.close(descriptor)


class LogWatcher:
    """Reads a server's JSON log lines in a thread, so that tests wait for an event and never for a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.lines: list[dict[str, str]] = []
        self._news = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._thread.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for text in process.stderr:
            try:
                line = json.loads(text)
            except ValueError:
                line = {"level": "raw", "message": text.rstrip("\n"), "role": ""}
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def wait_for(
        self, fragment: str, timeout: float = START_SECONDS, after: int = 0, role: str = ""
    ) -> dict[str, str]:
        """The first line from number `after` on, of one role if that is given, whose message contains `fragment`.

        Fails when the log ends without it.
        """

        def found() -> dict[str, str] | None:
            lines = (line for line in self.lines[after:] if line["role"] == role or not role)
            return next((line for line in lines if fragment in line["message"]), None)

        with self._news:
            self._news.wait_for(lambda: found() is not None or self._ended, timeout)
            line = found()
            assert line is not None, f"{fragment!r} was not logged:\n{self.text()}"
            return line

    def text(self) -> str:
        """The log so far."""
        return "\n".join(f"{line['level']}: {line['role']}: {line['message']}" for line in self.lines)

    def finish(self) -> str:
        """The whole log, once every process that writes to it has ended."""
        self._thread.join(30)
        return self.text()


class Server:
    """A server on a free port with a runtime folder of its own."""

    def __init__(self, model: Path, runtime_dir: Path, *flags: str, program: tuple[str, ...] = ()) -> None:
        self.runtime_dir = runtime_dir
        self.process = self._start(
            program or ("-m", "service.cli.main"),
            [
                "serve",
                f"--model={model}",
                "--port=0",
                f"--runtime-dir={runtime_dir}",
                "--log-format=json",
                *flags,
            ],
        )
        self.log = LogWatcher(self.process)

    def _start(self, program: tuple[str, ...], arguments: list[str]) -> subprocess.Popen[str]:
        command = [sys.executable, *program, *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)

    def __enter__(self) -> Server:
        self.log.wait_for("ready: ")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.log.finish()

    def status(self) -> control_pb2.GetStatusResponse:
        """What `numaserve status` shows."""
        return fetch_status(self.runtime_dir, START_SECONDS)

    @property
    def address(self) -> str:
        """The shared port."""
        return self.status().address

    def client(self, worker: int | None = None) -> numaserve.Client:
        """A client of the shared port, or of one worker's own socket."""
        status = self.status()
        return numaserve.Client(status.address if worker is None else status.workers[worker].address)

    def pids(self) -> set[int]:
        """Every process of the server."""
        parents: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                except OSError:
                    continue
        family = {self.process.pid}
        while True:
            grown = family | {pid for pid, parent in parents.items() if parent in family}
            if grown == family:
                return family
            family = grown
