"""The launcher, its zygotes and their workers as real processes, over a service that holds no model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from served import is_gone, wait_until_gone

from placement.unit import send_signal


def test_two_units_serve_from_one_load_each_and_end_in_order(start) -> None:
    toy = start(2, 1)
    toy.log.wait_for("ready: toy")
    answers = [toy.ask(worker) for worker in range(3)]
    assert {answer["contents"] for answer in answers} == {"weights of the toy"}
    assert len({answer["pid"] for answer in answers}) == 3
    assert answers[0]["parent"] == answers[1]["parent"] != answers[2]["parent"]
    assert toy.loads() == 2
    toy.process.send_signal(signal.SIGTERM)
    assert toy.process.wait(20) == 0
    wait_until_gone({answer["pid"] for answer in answers} | {answer["parent"] for answer in answers})
    assert not toy.runtime_dir.exists()


def test_a_killed_worker_is_replaced_without_a_load(start) -> None:
    toy = start(2)
    toy.log.wait_for("ready: toy")
    before, other = toy.ask(0), toy.ask(1)
    os.kill(before["pid"], signal.SIGKILL)
    line = toy.log.wait_for("worker 0 serves again")
    assert f"after the death of pid {before['pid']}" in line["message"]
    assert " ms " in line["message"]
    assert toy.ask(0)["pid"] != before["pid"]
    assert (before["replaces"], toy.ask(0)["replaces"]) == (False, True)
    assert toy.ask(0)["contents"] == "weights of the toy"
    assert toy.ask(1) == other
    assert toy.loads() == 1


def test_a_killed_zygote_costs_no_worker_and_the_next_one_forks_from_the_same_segment(start) -> None:
    toy = start(1)
    toy.log.wait_for("ready: toy")
    first = toy.ask(0)
    mark = len(toy.log.lines)
    os.kill(first["parent"], signal.SIGKILL)
    toy.log.wait_for("pinned", after=mark)
    assert toy.ask(0)["pid"] == first["pid"]
    os.kill(first["pid"], signal.SIGKILL)
    toy.log.wait_for("worker 0 serves again")
    assert toy.ask(0)["parent"] not in (first["parent"], toy.process.pid)
    assert toy.loads() == 1


def test_worker_and_zygote_killed_together_come_back(start) -> None:
    toy = start(2)
    toy.log.wait_for("ready: toy")
    first = toy.ask(0)
    for pid in (first["parent"], first["pid"]):
        os.kill(pid, signal.SIGKILL)
    toy.log.wait_for("worker 0 serves again")
    assert toy.ask(0)["contents"] == "weights of the toy"


def test_when_the_launcher_is_killed_everything_ends(start) -> None:
    toy = start(2, 1)
    toy.log.wait_for("ready: toy")
    family = toy.family() | {toy.ask(worker)["pid"] for worker in range(3)}
    toy.process.kill()
    wait_until_gone(family)
    assert toy.runtime_dir.exists()
    again = start(1)
    again.log.wait_for("ready: toy")


def test_a_loader_that_is_killed_is_started_once_more(start) -> None:
    toy = start(1, loader="is killed once")
    toy.log.wait_for("ready: toy")
    assert toy.loads() == 2
    assert toy.log.wait_for("the loader ended without a segment: killed by SIGKILL")["level"] == "warning"


@pytest.mark.parametrize(
    ("options", "status", "reason"),
    [
        ({"loader": "fails"}, 2, "the model is no good"),
        ({"loader": "is killed"}, 3, "the loader ended without a segment: killed by SIGKILL (out of memory"),
        ({"prepare": "fails"}, 2, "the tokenizer is no good"),
        ({"prepare": "starts a thread"}, 1, "the zygote has 2 threads, so it must not fork"),
        ({"worker": "fails"}, 2, "the cache is too small"),
        ({"worker": "crashes"}, 3, "failed to start 3 times in a row: killed by SIGABRT"),
    ],
)
def test_a_start_that_cannot_succeed_ends_with_its_reason(
    start, options: dict, status: int, reason: str
) -> None:
    toy = start(1, **options)
    assert toy.process.wait(30) == status
    toy.log.finish()
    errors = [line["message"] for line in toy.log.lines if line["level"] == "error"]
    assert any(reason in message for message in errors), toy.log.text()
    assert not toy.runtime_dir.exists()


def test_a_second_signal_stops_at_once(start) -> None:
    toy = start(1, worker="ignores drain")
    toy.log.wait_for("ready: toy")
    pid = toy.ask(0)["pid"]
    toy.process.send_signal(signal.SIGTERM)
    toy.log.wait_for("draining, at most 5 s")
    toy.process.send_signal(signal.SIGINT)
    assert toy.process.wait(20) == 128 + signal.SIGINT
    assert is_gone(pid)


def test_a_worker_that_does_not_drain_is_killed_after_the_time_out(start) -> None:
    toy = start(1, worker="ignores drain")
    toy.log.wait_for("ready: toy")
    pid = toy.ask(0)["pid"]
    toy.process.send_signal(signal.SIGTERM)
    assert toy.process.wait(30) == 0
    assert "did not end in time" in toy.log.finish()
    assert is_gone(pid)


def test_a_killed_control_process_is_started_again(start) -> None:
    toy = start(1)
    toy.log.wait_for("ready: toy")
    zygote = toy.ask(0)["parent"]
    (control,) = toy.family() - {zygote}
    os.kill(control, signal.SIGKILL)
    toy.log.wait_for("the control process ended: killed by SIGKILL")
    assert toy.ask(0)["parent"] == zygote


def test_signalling_a_process_that_its_zygote_has_reaped_is_no_error() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert not send_signal(gone.pid, signal.SIGKILL)
    assert send_signal(os.getpid(), signal.SIGCONT)
