"""One connection, several workers: requests spread, and a relayed answer is the same as a direct one."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from served import Server

import numaserve
from numaserve.v1 import inference_pb2

# The reference backend is slow enough that a stream of 400 tokens still runs when the next call comes.
FLAGS = (
    "--workers=4",
    "--kv-cache-memory=16MiB",
    "--dtype=float32",
    "--max-num-seqs=16",
    "--worker-ports=0",
    "--backend=torch",
)
LONG: dict[str, Any] = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tiny_model, tmp_path_factory.mktemp("balance") / "r", *FLAGS) as running:
        yield running


class Held:
    """A stream that has begun on the worker it arrived at and is not read on: it keeps that worker busy."""

    def __init__(self, server: Server, worker: int) -> None:
        self._client = server.client(worker)
        self._stream = self._client.stream("hold on", **LONG)
        self.served_by = next(self._stream).served_by.worker

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._client.close()


def same_but_who_and_when(answer: inference_pb2.InferResponse) -> inference_pb2.InferResponse:
    copy = inference_pb2.InferResponse()
    copy.CopyFrom(answer)
    copy.ClearField("served_by")
    copy.ClearField("timings")
    return copy


def test_32_calls_over_one_connection_keep_4_workers_evenly_busy(server: Server) -> None:
    served: list[int] = []
    with server.client() as client:

        def call(number: int) -> None:
            parts = list(client.stream(f"{number}: once upon a time", max_tokens=40, ignore_eos=True))
            assert parts[0].served_by == parts[-1].served_by
            assert parts[-1].usage.completion_tokens == 40
            served.append(parts[-1].served_by.worker)

        threads = [threading.Thread(target=call, args=(number,)) for number in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    counts = Counter(served)
    assert sum(counts.values()) == 32
    assert all(abs(counts[worker] - 8) <= 0.15 * 8 for worker in range(4)), counts


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"seed": 5, "n": 2, "logprobs": 2},
        {"temperature": 0, "prompt_logprobs": 1, "stop": ["a"]},
        {"temperature": 0, "structured_output": {"choice": ["yes", "no"]}},
    ],
)
def test_a_relayed_answer_equals_a_direct_one(server: Server, fields: dict[str, Any]) -> None:
    wanted = {"prompt": "The quick", "max_tokens": 12, "request_id": "mine", **fields}
    with server.client(0) as client:
        direct = client.infer(**wanted)
        assert direct.served_by.worker == 0
        with Held(server, 0) as held:
            assert held.served_by == 0
            relayed = client.infer(**wanted)
            parts = list(client.stream(**wanted))
    assert relayed.served_by.worker != 0
    assert relayed.served_by.pid == server.status().workers[relayed.served_by.worker].pid
    assert same_but_who_and_when(relayed) == same_but_who_and_when(direct)
    text = "".join(part.text for part in parts if part.index == 0)
    assert text == direct.text
    assert parts[-1].usage == direct.usage
    assert parts[-1].served_by.worker != 0


def failure(client: numaserve.Client, **fields: Any) -> numaserve.InferenceError:
    with pytest.raises(numaserve.InferenceError) as raised:
        client.infer(**fields)
    return raised.value


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"structured_output": {"regex": "("}}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"timeout": 0.05, **LONG}, grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
)
def test_a_relayed_error_equals_a_direct_one(
    server: Server, fields: dict[str, Any], code: grpc.StatusCode
) -> None:
    with server.client(0) as client:
        direct = failure(client, prompt="The quick", **fields)
        with Held(server, 0):
            relayed = failure(client, prompt="The quick", **fields)
    assert relayed.code == direct.code == code
    # Of a deadline, the client's own clock may tell before the server's answer does.
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED or relayed.details == direct.details
    assert relayed.field_violations == direct.field_violations


def test_cancelling_a_relayed_call_ends_it_in_the_siblings_engine(server: Server) -> None:
    with Held(server, 0), server.client(0) as client:
        stream = client.stream("cancel me", **LONG)
        worker = next(stream).served_by.worker
        assert worker != 0
        before = server.status().workers[worker]
        stream.close()
        while server.status().workers[worker].running:
            pass
        after = server.status().workers[worker]
    assert after.kv_blocks_free == after.kv_blocks_total
    assert before.generated_tokens <= after.generated_tokens < before.generated_tokens + 400


def test_each_worker_answers_on_a_port_of_its_own_and_on_its_socket(server: Server) -> None:
    workers = server.status().workers
    assert len({worker.tcp_address for worker in workers}) == 4
    for worker in workers:
        for address in (worker.address, worker.tcp_address):
            with numaserve.Client(address) as client:
                assert client.infer("hello", max_tokens=1).served_by.worker == worker.worker


def test_a_call_whose_worker_was_killed_is_answered_by_another(server: Server) -> None:
    mark = len(server.log.lines)
    with Held(server, 0), server.client(0) as client:
        for worker in (1, 2, 3):
            os.kill(server.status().workers[worker].pid, signal.SIGKILL)
        answers = [client.infer("hello", max_tokens=2, timeout=60) for _ in range(5)]
        assert all(answer.usage.completion_tokens == 2 for answer in answers)
    for worker in (1, 2, 3):
        server.log.wait_for(f"worker {worker} serves again", after=mark)
    assert all(name.stat().st_mode & 0o077 == 0 for name in [server.runtime_dir])
