"""Kill, stop, store into a weight: what each costs, and what is left behind."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from served import Server, is_gone, wait_until_gone

import numaserve

# The reference backend is slow enough that a stream of 400 tokens still runs when something is done to the server.
FLAGS = ("--workers-per-node=2", "--kv-cache-memory=16MiB", "--dtype=float32", "--backend=torch")
PROMPT = "The quick brown fox"
LONG = {"prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def stream_in_thread(client: numaserve.Client, started: threading.Event, result: dict) -> threading.Thread:
    """Reads a long answer; `started` is set at its first token, when `result` names the process that makes it."""

    def read() -> None:
        tokens: list[int] = []
        try:
            for part in client.stream(**LONG):
                tokens += part.token_ids
                result["pid"] = part.served_by.pid
                started.set()
            result["tokens"] = tokens
        except numaserve.InferenceError as error:
            result["error"] = error
            started.set()

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def test_a_killed_worker_is_replaced_and_others_do_not_notice(tiny_model: Path, tmp_path: Path) -> None:
    with (
        Server(tiny_model, tmp_path / "r", *FLAGS) as server,
        server.client(0) as kept,
        server.client(1) as lost,
    ):
        expected = list(kept.infer(**LONG).token_ids)
        opened = len(server.log.lines)
        started, result = threading.Event(), {}
        thread = stream_in_thread(kept, started, result)
        lost_started, lost_result = threading.Event(), {}
        lost_thread = stream_in_thread(lost, lost_started, lost_result)
        assert lost_started.wait(60)
        # Asking for the status would take longer than the stream has left.
        victim = lost_result["pid"]
        os.kill(victim, signal.SIGKILL)
        line = server.log.wait_for("worker 1 serves again")
        assert " ms after the death of pid " in line["message"]
        thread.join()
        lost_thread.join()
        assert result["tokens"] == expected
        assert lost_result["error"].code == grpc.StatusCode.UNAVAILABLE
        with server.client(1) as again:
            answer = again.infer(**LONG)
        assert list(answer.token_ids) == expected
        assert answer.served_by.pid not in (victim, 0)
        assert not any("loading" in line["message"] for line in server.log.lines[opened:])
        assert server.status().workers[1].restarts == 1


def test_a_store_through_a_weight_ends_that_worker_alone(tiny_model: Path, tmp_path: Path) -> None:
    program = (str(Path(__file__).parents[1] / "poking_program.py"),)
    with Server(tiny_model, tmp_path / "r", *FLAGS, program=program) as server, server.client(0) as bystander:
        expected = list(bystander.infer(**LONG).token_ids)
        with (tmp_path / "r" / "poke-1").open("wb") as fifo:
            fifo.write(b"x")
        server.log.wait_for("storing into ")
        line = server.log.wait_for("worker 1 (pid ")
        assert "killed by SIGSEGV" in line["message"]
        server.log.wait_for("worker 1 serves again")
        for worker in (0, 1):
            with server.client(worker) as client:
                assert list(client.infer(**LONG).token_ids) == expected


def test_sigterm_turns_health_first_and_finishes_what_runs(tiny_model: Path, tmp_path: Path) -> None:
    with Server(tiny_model, tmp_path / "r", *FLAGS) as server, server.client(0) as client:
        expected = list(client.infer(**LONG).token_ids)
        pids = server.pids()
        with grpc.insecure_channel(server.status().workers[0].address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            started, result = threading.Event(), {}
            threads = [stream_in_thread(client, started, result)]
            assert started.wait(60)
            server.process.send_signal(signal.SIGTERM)
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert "tokens" not in result
            for thread in threads:
                thread.join()
        assert result["tokens"] == expected
        assert server.process.wait(60) == 0
        assert all(map(is_gone, pids))
        assert not (tmp_path / "r").exists()


def test_a_request_that_outlasts_the_drain_time_out_is_ended_and_the_exit_is_clean(
    tiny_model: Path, tmp_path: Path
) -> None:
    flags = (*FLAGS, "--drain-timeout=0")
    with Server(tiny_model, tmp_path / "r", *flags) as server, server.client(0) as client:
        started, result = threading.Event(), {}
        thread = stream_in_thread(client, started, result)
        assert started.wait(60)
        server.process.send_signal(signal.SIGTERM)
        thread.join()
        assert result["error"].code == grpc.StatusCode.UNAVAILABLE
        assert server.process.wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_is_prompt_and_leaves_nothing(tiny_model: Path, tmp_path: Path, number: int) -> None:
    with Server(tiny_model, tmp_path / "r", *FLAGS) as server, server.client(0) as client:
        pids = server.pids()
        started, result = threading.Event(), {}
        thread = stream_in_thread(client, started, result)
        assert started.wait(60)
        server.process.send_signal(signal.SIGTERM)
        server.log.wait_for("draining")
        server.process.send_signal(number)
        assert server.process.wait(20) == 128 + number
        thread.join()
        assert all(map(is_gone, pids))
        assert not (tmp_path / "r").exists()


def test_when_the_launcher_is_killed_workers_finish_and_end(tiny_model: Path, tmp_path: Path) -> None:
    with Server(tiny_model, tmp_path / "r", *FLAGS) as server, server.client(0) as client:
        expected = list(client.infer(**LONG).token_ids)
        pids = server.pids() - {server.process.pid}
        started, result = threading.Event(), {}
        thread = stream_in_thread(client, started, result)
        assert started.wait(60)
        server.process.kill()
        server.process.wait()
        thread.join()
        assert result["tokens"] == expected
        wait_until_gone(pids)


def test_workers_that_are_ended_in_turn_reset_no_connection_and_fail_no_call(
    tiny_model: Path, tmp_path: Path
) -> None:
    stop = threading.Event()
    faults: list[str] = []
    calls = itertools.count()

    def connect_and_call(address: str) -> None:
        # A subchannel pool of its own makes each client connect anew.
        options = [("grpc.use_local_subchannel_pool", 1)]
        while not stop.is_set():
            try:
                with numaserve.Client(address, timeout=60, options=options) as client:
                    client.infer(PROMPT, max_tokens=1)
                next(calls)
            except numaserve.InferenceError as error:
                faults.append(str(error))

    def connect_alone(address: str) -> None:
        host, _, port = address.rpartition(":")
        while not stop.is_set():
            try:
                with socket.create_connection((host, int(port)), 30) as connection:
                    connection.sendall(
                        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
                    )
                    assert connection.recv(9)
                next(calls)
            except (OSError, AssertionError) as error:
                faults.append(f"bare connection: {error!r}")

    with Server(tiny_model, tmp_path / "r", *FLAGS, "--drain-timeout=5") as server:
        address = server.address
        threads = [
            threading.Thread(target=work, args=(address,)) for work in (connect_and_call, connect_alone) * 2
        ]
        for thread in threads:
            thread.start()
        for worker in (0, 1, 0, 1):
            mark = len(server.log.lines)
            os.kill(server.status().workers[worker].pid, signal.SIGTERM)
            server.log.wait_for(f"worker {worker} serves again", after=mark)
        stop.set()
        for thread in threads:
            thread.join()
    assert faults == []
    assert next(calls) > 4
