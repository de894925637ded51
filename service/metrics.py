"""Prometheus metrics of a server, made from what GetStatus answers, so that both always say the same.

Served by the control process over HTTP. Counters of a worker start again when its place is filled anew, as Prometheus
expects of a restarted process. Exposition: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from numaserve.v1 import control_pb2

log = logging.getLogger("numaserve.control")

_WORKER_LABELS = ("worker", "unit")
_STATES = ("starting", "serving", "draining", "stopped")
_VERDICTS = ("bound", "partly bound", "unbound")
_SCRAPE_SECONDS = 10.0

# Metric's name without prefix, its help, and the field of WorkerStatus that it shows.
_GAUGES = (
    ("requests_running", "Completions that the engine computes now", "running"),
    ("requests_waiting", "Completions that wait for room", "waiting"),
    ("kv_cache_blocks", "Blocks of the KV cache", "kv_blocks_total"),
    ("kv_cache_free_blocks", "Blocks of the KV cache that are free or can be evicted", "kv_blocks_free"),
    ("kv_cache_bytes", "Size of the KV cache", "kv_cache_bytes"),
)
_COUNTERS = (
    ("requests", "Requests taken", "requests"),
    ("prompt_tokens", "Prompt tokens of requests taken", "prompt_tokens"),
    ("generated_tokens", "Tokens generated", "generated_tokens"),
    ("cached_prompt_tokens", "Prompt tokens found in the prefix cache", "cached_tokens"),
    ("preemptions", "Sequences that gave up their blocks to be computed again", "preemptions"),
)
_MEMORY = (
    ("memory_pss_bytes", "Proportional set size", "pss_bytes"),
    ("memory_weights_pss_bytes", "Part of it that is weights", "weights_pss_bytes"),
    ("memory_kv_pss_bytes", "Part of it that is KV cache", "kv_pss_bytes"),
)


def families(status: control_pb2.GetStatusResponse) -> Iterator[Metric]:
    """The metric families of one moment. Sizes are bytes, times seconds."""
    yield _gauge("info", "What is served", {"version": status.version, "model": status.model}, 1)
    yield _gauge(
        "up", "Whether the server has begun to serve and is not draining", {}, status.state == "serving"
    )
    yield _gauge("uptime_seconds", "Time since the launcher's start", {}, status.uptime_seconds)
    yield _gauge("total_pss_bytes", "Proportional set size of all processes", {}, status.total_pss_bytes)
    yield from _worker_families(status)
    yield from _placement_families(status)


def _worker_families(status: control_pb2.GetStatusResponse) -> Iterator[Metric]:
    workers = [(worker, (str(worker.worker), worker.unit)) for worker in status.workers]
    for name, text, attribute in (*_GAUGES, *_MEMORY):
        family = GaugeMetricFamily(f"numaserve_{name}", text, labels=_WORKER_LABELS)
        for worker, labels in workers:
            value = getattr(worker, attribute)
            # -1 stands for what could not be read; a gauge that is absent says so better.
            if value >= 0:
                family.add_metric(labels, value)
        yield family
    for name, text, attribute in _COUNTERS:
        counter = CounterMetricFamily(f"numaserve_{name}", text, labels=_WORKER_LABELS)
        for worker, labels in workers:
            counter.add_metric(labels, getattr(worker, attribute))
        yield counter
    restarts = CounterMetricFamily(
        "numaserve_worker_restarts", "How often a worker's place was filled anew", labels=_WORKER_LABELS
    )
    states = GaugeMetricFamily(
        "numaserve_worker_state", "1 for the state that a worker is in", labels=(*_WORKER_LABELS, "state")
    )
    for worker, labels in workers:
        restarts.add_metric(labels, worker.restarts)
        for state in _STATES:
            states.add_metric((*labels, state), worker.state == state)
    yield restarts
    yield states


def _placement_families(status: control_pb2.GetStatusResponse) -> Iterator[Metric]:
    sizes = GaugeMetricFamily("numaserve_segment_bytes", "Size of a segment of weights", labels=("unit",))
    loading = GaugeMetricFamily(
        "numaserve_segment_load_seconds", "Time that loading it took", labels=("unit",)
    )
    verdicts = GaugeMetricFamily(
        "numaserve_placement_verdict",
        "1 for the verdict on where memory lies; kind is segment or kv_cache, name a unit or a worker",
        labels=("kind", "name", "verdict"),
    )
    pages = GaugeMetricFamily(
        "numaserve_placement_pages",
        "Pages found on each node; wanted says whether they belong there",
        labels=("kind", "name", "node", "wanted"),
    )
    for segment in status.segments:
        sizes.add_metric((segment.unit,), segment.bytes)
        loading.add_metric((segment.unit,), segment.load_seconds)
    places = [("segment", each.unit, each.verdict, each.pages, each.nodes) for each in status.segments]
    places += [
        ("kv_cache", str(each.worker), each.kv_verdict, each.kv_pages, each.kv_nodes)
        for each in status.workers
    ]
    for kind, name, verdict, found, wanted in places:
        for word in _VERDICTS:
            verdicts.add_metric((kind, name, word), verdict == word)
        for entry in found:
            belongs = str(entry.node in wanted).lower()
            pages.add_metric((kind, name, str(entry.node), belongs), entry.pages)
    yield from (sizes, loading, verdicts, pages)


def _gauge(name: str, text: str, labels: dict[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(f"numaserve_{name}", text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family


class _StatusCollector(Collector):
    """Asks for the status anew at each scrape."""

    def __init__(self, read: Callable[[], control_pb2.GetStatusResponse | None]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        status = self._read()
        if status is not None:
            yield from families(status)


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        log.debug(format, *arguments)


class _Server(ThreadingMixIn, WSGIServer):
    """A client that reads slowly holds up nobody else."""

    daemon_threads = True
    allow_reuse_address = True
    # In an upgrade in place the server before this one listens a little longer.
    allow_reuse_port = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class MetricsServer:
    """Answers GET /metrics on `host`:`port` in a thread of its own; `read` runs on `loop`.

    Raises OSError where the address cannot be had. Port 0 picks a free one, see `port`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        read: Callable[[], Coroutine[Any, Any, control_pb2.GetStatusResponse | None]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        def read_now() -> control_pb2.GetStatusResponse | None:
            future = asyncio.run_coroutine_threadsafe(read(), loop)
            try:
                return future.result(_SCRAPE_SECONDS)
            except FutureTimeout:
                future.cancel()
                raise

        registry = CollectorRegistry()
        registry.register(_StatusCollector(read_now))
        server_class = _Server6 if ":" in host else _Server
        self._server = make_server(host, port, make_wsgi_app(registry), server_class, _Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
