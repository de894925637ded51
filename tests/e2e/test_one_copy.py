"""One physical copy of the weights, however many workers read it."""

from __future__ import annotations

from pathlib import Path

import pytest
from served import Server
from tiny_models import make_tiny_model

from placement.residency import process_memory
from placement.segment import MEMFD_PREFIX


@pytest.fixture(scope="module")
def larger_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 60 MB of weights, so that a page more or less does not matter."""
    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "larger",
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=6,
    )


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_the_weights_are_in_memory_once(larger_model: Path, tmp_path: Path, workers: int) -> None:
    flags = (f"--workers-per-node={workers}", "--kv-cache-memory=8MiB", "--dtype=float32")
    with Server(larger_model, tmp_path / "r", *flags) as server:
        for worker in range(workers):
            with server.client(worker) as client:
                client.infer(prompt="The quick brown fox", max_tokens=2)
        status = server.status()
        segment = status.segments[0].bytes
        memories = [process_memory(pid, MEMFD_PREFIX) for pid in server.pids()]
        weights = sum(memory.weights_pss for memory in memories)
        # Each reader rounds its share of each mapping down to a kB.
        assert 0.9 * segment < weights <= 1.01 * segment
        assert status.weights_pss_bytes == pytest.approx(weights, rel=0.01)
        for worker in status.workers:
            assert worker.weights_pss_bytes == pytest.approx(weights / workers, rel=0.05)
            own = worker.pss_bytes - worker.weights_pss_bytes - worker.kv_pss_bytes
            # What all share of the interpreter and of torch is divided by few here; a worker adds far less than this.
            assert own < 120e6 * (1 + 2 / workers)
