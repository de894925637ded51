"""A server of its own for a benchmark."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from numaserve.v1 import control_pb2
from service.cli.status import fetch_status


@dataclass(frozen=True)
class RunningServer:
    """A server that serves with all its workers; `seconds` is how long it took from its start to that."""

    process: subprocess.Popen[bytes]
    runtime_dir: Path
    address: str
    seconds: float

    def status(self) -> control_pb2.GetStatusResponse:
        """What `numaserve status` shows."""
        return fetch_status(self.runtime_dir)


@contextmanager
def running_server(model: Path, arguments: Sequence[str], timeout: float) -> Iterator[RunningServer]:
    """Serve `model` on a free port. Raises RuntimeError with the end of its log when it does not come up."""
    with tempfile.TemporaryDirectory() as scratch:
        runtime_dir, log = Path(scratch) / "run", Path(scratch) / "log"
        command = [sys.executable, "-m", "service.cli.main", "serve", f"--model={model}", "--port=0"]
        began = time.monotonic()
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [*command, f"--runtime-dir={runtime_dir}", *arguments], stdout=sink, stderr=sink
            )
        try:
            while b"ready: " not in log.read_bytes():
                if process.poll() is not None or time.monotonic() - began > timeout:
                    raise RuntimeError(f"the server did not come up:\n{log.read_text()[-2000:]}")
                time.sleep(0.01)
            seconds = time.monotonic() - began
            yield RunningServer(process, runtime_dir, fetch_status(runtime_dir).address, seconds)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
