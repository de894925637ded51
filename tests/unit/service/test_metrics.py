"""Metrics say what GetStatus says, in Prometheus' form."""

import asyncio
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from numaserve.v1 import control_pb2
from service.metrics import MetricsServer

STATUS = control_pb2.GetStatusResponse(
    version="1.2",
    model='a "model"\\n',
    state="serving",
    uptime_seconds=2.5,
    total_pss_bytes=10**12,
    segments=[
        control_pb2.SegmentStatus(
            unit="node0",
            bytes=4096,
            verdict="partly bound",
            nodes=[0],
            pages=[
                control_pb2.NodePages(node=0, pages=7),
                control_pb2.NodePages(node=1, pages=3),
            ],
        )
    ],
    workers=[
        control_pb2.WorkerStatus(
            worker=0, unit="node0", state="serving", running=3, kv_verdict="bound", pss_bytes=-1, restarts=2
        ),
        control_pb2.WorkerStatus(worker=1, unit="node0", state="draining", requests=9, pss_bytes=5),
    ],
)


class Scraped:
    """A running metrics server over a status that a test may change."""

    def __init__(self) -> None:
        self.status: control_pb2.GetStatusResponse | None = STATUS
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.server = MetricsServer("127.0.0.1", 0, self._read, self.loop)

    async def _read(self) -> control_pb2.GetStatusResponse | None:
        return self.status

    def text(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.server.port}/metrics", timeout=30) as answer:
            return str(answer.read().decode())

    def samples(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(self.text())
            for sample in family.samples
        }

    def close(self) -> None:
        self.server.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def scraped() -> Iterator[Scraped]:
    running = Scraped()
    yield running
    running.close()


def test_what_a_scrape_tells(scraped: Scraped) -> None:
    samples = scraped.samples()

    def value(name: str, /, **labels: str) -> float:
        return samples[f"numaserve_{name}", frozenset(labels.items())]

    worker = {"worker": "0", "unit": "node0"}
    assert value("info", version="1.2", model='a "model"\\n') == 1
    assert value("up") == 1
    assert value("total_pss_bytes") == 10**12
    assert value("requests_running", **worker) == 3
    assert value("requests_total", worker="1", unit="node0") == 9
    assert value("worker_restarts_total", **worker) == 2
    assert value("worker_state", **worker, state="serving") == 1
    assert value("worker_state", **worker, state="draining") == 0
    assert value("segment_bytes", unit="node0") == 4096
    assert value("placement_verdict", kind="segment", name="node0", verdict="partly bound") == 1
    assert value("placement_verdict", kind="segment", name="node0", verdict="bound") == 0
    assert value("placement_verdict", kind="kv_cache", name="0", verdict="bound") == 1
    assert value("placement_pages", kind="segment", name="node0", node="0", wanted="true") == 7
    assert value("placement_pages", kind="segment", name="node0", node="1", wanted="false") == 3


def test_what_could_not_be_read_is_absent_and_not_minus_one(scraped: Scraped) -> None:
    told = [labels for name, labels in scraped.samples() if name == "numaserve_memory_pss_bytes"]
    assert told == [frozenset({("worker", "1"), ("unit", "node0")})]


def test_each_scrape_is_a_new_look(scraped: Scraped) -> None:
    changed = control_pb2.GetStatusResponse()
    changed.CopyFrom(STATUS)
    changed.state = "draining"
    scraped.status = changed
    assert scraped.samples()["numaserve_up", frozenset()] == 0


def test_before_the_first_state_there_is_nothing_to_tell(scraped: Scraped) -> None:
    scraped.status = None
    assert scraped.samples() == {}


def test_a_port_that_strangers_hold_is_an_error(scraped: Scraped) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger, pytest.raises(OSError, match="in use"):
        MetricsServer("127.0.0.1", stranger.getsockname()[1], scraped._read, scraped.loop)


def test_a_successor_can_listen_beside_it(scraped: Scraped) -> None:
    successor = MetricsServer("127.0.0.1", scraped.server.port, scraped._read, scraped.loop)
    assert successor.port == scraped.server.port
    successor.close()
