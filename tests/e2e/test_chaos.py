"""Processes killed at random under constant load: what is answered is right, and the service is back each time."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from served import Server, wait_until_gone

import numaserve

KILLS = int(os.environ.get("NUMASERVE_CHAOS_KILLS", "8"))
STREAMS = 16
FLAGS = ("--workers=3", "--kv-cache-memory=16MiB", "--dtype=float32")
DEAF_PROGRAM = str(Path(__file__).parents[1] / "deaf_program.py")
PROMPTS = [f"{number} times the fox" for number in range(STREAMS)]
FIELDS = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "timeout": 120}


@dataclass
class Load:
    """16 threads that stream without a pause, each over a connection of its own, and judge every answer."""

    address: str
    expected: list[list[int]]
    answers: int = 0
    interrupted: int = 0
    wrong: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        self._threads = [threading.Thread(target=self._stream, args=(n,)) for n in range(STREAMS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(150)
        assert not any(thread.is_alive() for thread in self._threads), "a call hangs"

    def _stream(self, number: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with numaserve.Client(self.address, options=options) as client:
            while not self._stop.is_set():
                tokens: list[int] = []
                try:
                    for part in client.stream(PROMPTS[number], **FIELDS):
                        tokens += part.token_ids
                    self.answers += 1
                    right = tokens == self.expected[number]
                except numaserve.InferenceError as error:
                    self.interrupted += 1
                    # What came before the end is right as well, and a call that had not begun is not lost.
                    right = error.code is grpc.StatusCode.UNAVAILABLE and bool(tokens)
                    right = right and tokens == self.expected[number][: len(tokens)]
                    if not right:
                        self.wrong.append(f"stream {number}: {error}, after {len(tokens)} tokens")
                        continue
                if not right:
                    self.wrong.append(f"stream {number}: {tokens}")


def wait_for(condition: Callable[[], bool], what: str) -> None:
    for _ in range(600):
        if condition():
            return
        threading.Event().wait(0.1)
    raise AssertionError(what)


def all_serve(server: Server) -> bool:
    try:
        return all(worker.state == "serving" for worker in server.status().workers)
    except ConnectionError:
        return False


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def victims(server: Server) -> dict[str, list[int]]:
    """Processes by kind, but for the launcher."""
    workers = [worker.pid for worker in server.status().workers if worker.pid]
    others = server.pids() - {server.process.pid, *workers}
    kinds: dict[str, list[int]] = {"worker": workers, "zygote": [], "control": []}
    for pid in others:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        kinds["control" if b"service.control" in command else "zygote"].append(pid)
    return kinds


@pytest.mark.timeout(120 + 30 * KILLS if KILLS > 16 else 600)
def test_random_kills_under_load_cost_nothing_but_the_streams_that_had_begun(
    tiny_model: Path, tmp_path: Path
) -> None:
    dice = random.Random(20)
    with Server(tiny_model, tmp_path / "r", *FLAGS) as server:
        with server.client() as client:
            expected = [list(client.infer(prompt, **FIELDS).token_ids) for prompt in PROMPTS]
        load = Load(server.address, expected)
        load.start()
        files, memory = open_files(server.process.pid), server.status().total_pss_bytes
        for _ in range(KILLS):
            kind = dice.choices(["worker", "zygote", "control"], [4, 2, 1])[0]
            victim = dice.choice(victims(server)[kind])
            os.kill(victim, signal.SIGKILL)
            wait_until_gone([victim])
            wait_for(lambda: all_serve(server), f"the service is not back after a {kind} was killed")
            wait_for(lambda: bool(victims(server)["zygote"]), "there is no zygote")
            if load.wrong:
                break
        load.stop()
        assert load.wrong == []
        assert load.answers > 0
        with server.client() as client:
            assert [list(client.infer(prompt, **FIELDS).token_ids) for prompt in PROMPTS] == expected
        wait_for(lambda: open_files(server.process.pid) <= files, "the launcher keeps descriptors")
        # Workers of a zygote that died share no pages with its successor's: fill every place from the last one.
        for place in server.status().workers:
            os.kill(place.pid, signal.SIGKILL)
            wait_until_gone([place.pid])
            wait_for(lambda: all_serve(server), "the service is not back")
        assert server.status().total_pss_bytes < 1.2 * memory
        assert not [line for line in server.log.lines if "loading" in line["message"]][2:]
    assert server.process.returncode == 0
    assert not (tmp_path / "r").exists()


def test_a_worker_that_hangs_is_replaced(tiny_model: Path, tmp_path: Path) -> None:
    with Server(tiny_model, tmp_path / "r", *FLAGS, "--hang-timeout=8") as server:
        victim = server.status().workers[1].pid
        os.kill(victim, signal.SIGSTOP)
        server.log.wait_for(f"worker 1 (pid {victim}) hangs: no heartbeat for ")
        server.log.wait_for("worker 1 serves again")
        wait_until_gone([victim])
        with server.client(1) as client:
            assert client.infer("hello", max_tokens=2).served_by.pid != victim


def test_a_worker_that_beats_but_answers_nothing_is_replaced(tiny_model: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, "--hang-timeout=3", "--self-request-interval=0.1", "--log-level=debug")
    with Server(tiny_model, tmp_path / "r", *flags, program=(DEAF_PROGRAM,)) as server:
        for worker in range(3):
            server.log.wait_for("this worker answers itself", role=f"worker {worker}")
        # Nobody but the workers themselves has asked for anything.
        workers = server.status().workers
        assert {(each.requests, each.prompt_tokens, each.generated_tokens) for each in workers} == {(0, 0, 0)}
        victim = workers[1].pid
        (tmp_path / "r" / f"deaf-{victim}").touch()
        line = server.log.wait_for("this worker does not answer (a request of its own was silent for 3 s)")
        assert line["role"] == "worker 1"
        server.log.wait_for("worker 1 serves again")
        wait_until_gone([victim])
        with server.client(1) as client:
            assert client.infer("hello", max_tokens=2).served_by.pid != victim
        assert "no heartbeat for" not in server.log.text()
        assert [place.pid for place in server.status().workers][::2] == [workers[0].pid, workers[2].pid]
