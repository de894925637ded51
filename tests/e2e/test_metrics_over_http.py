"""A real server's metrics: scraped over HTTP, in step with its status, and back after the control process died."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from served import Server

FLAGS = ("--workers=2", "--kv-cache-memory=16MiB", "--metrics-port=0")


def scrape(server: Server, after: int = 0) -> dict[str, float]:
    """The sum of each metric over its labels."""
    line = server.log.wait_for("metrics on http", after=after)
    found = re.search(r"http://\S+", line["message"])
    assert found is not None
    with urllib.request.urlopen(found.group(), timeout=60) as answer:
        text = answer.read().decode()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def test_metrics_follow_the_status_and_come_back_with_the_control_process(
    tiny_model: Path, tmp_path: Path
) -> None:
    with Server(tiny_model, tmp_path / "r", *FLAGS) as server:
        before = scrape(server)
        assert (before["numaserve_up"], before["numaserve_requests_total"]) == (1, 0)
        with server.client() as client:
            for _ in range(3):
                client.infer("hello there", max_tokens=4, temperature=0, ignore_eos=True)
        after, status = scrape(server), server.status()
        assert after["numaserve_requests_total"] == sum(each.requests for each in status.workers) == 3
        assert after["numaserve_generated_tokens_total"] == 12
        assert after["numaserve_segment_bytes"] == status.segments[0].bytes
        known = len(server.log.lines)
        (control,) = (
            pid for pid in server.pids() if b"service.control" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        os.kill(control, signal.SIGKILL)
        assert scrape(server, after=known)["numaserve_requests_total"] == 3


def test_a_metrics_port_that_is_taken_is_refused_by_flag(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        command = [sys.executable, "-m", "service.cli.main", "serve", f"--model={tiny_model}", "--port=0"]
        done = subprocess.run(
            [*command, f"--metrics-port={port}"], capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 2
    assert f"--metrics-port {port}: Address already in use" in done.stderr
