"""Reloads and changes of the number of workers, as real processes over a service that holds no model."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from served import wait_until_gone
from toy import Toy

from placement.hand_over import GO, READY, take_over


def next_is(toy: Toy, **changes: object) -> None:
    (toy.directory / "next").write_text(json.dumps(changes))


def reload(toy: Toy, outcome: str = "reload: done") -> None:
    mark = len(toy.log.lines)
    toy.process.send_signal(signal.SIGHUP)
    toy.log.wait_for(outcome, after=mark)


def segments(toy: Toy) -> int:
    """Descriptors of weights that the launcher holds."""
    descriptors = Path(f"/proc/{toy.process.pid}/fd")
    return sum("numaserve-weights" in os.readlink(entry) for entry in descriptors.iterdir())


def test_a_reload_serves_new_weights_from_new_processes_and_frees_the_old(start) -> None:
    toy = start(2, 1)
    toy.log.wait_for("ready: toy")
    before = [toy.ask(worker) for worker in range(3)]
    for number in (1, 2, 3):
        next_is(toy, contents=f"weights {number}", counts=[2, 1])
        reload(toy)
        answers = [toy.ask(worker) for worker in range(3)]
        assert {answer["contents"] for answer in answers} == {f"weights {number}"}
        assert {answer["generation"] for answer in answers} == {number}
        wait_until_gone({answer[who] for answer in before for who in ("pid", "parent")})
        before = answers
        assert segments(toy) == 2
    assert toy.loads() == 8
    # Descriptors do not pile up.
    open_files = len(os.listdir(f"/proc/{toy.process.pid}/fd"))
    reload(toy)
    assert len(os.listdir(f"/proc/{toy.process.pid}/fd")) == open_files


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"loader": "fails"}, "the model is no good"),
        ({"loader": "is killed"}, "the loader ended without a segment: killed by SIGKILL"),
        ({"prepare": "fails"}, "the tokenizer is no good"),
        ({"prepare": "starts a thread"}, "the zygote has 2 threads"),
        ({"worker": "crashes"}, "ended before it served: killed by SIGABRT"),
        ({"worker": "fails its trial"}, "the answer makes no sense"),
        ({"refuse": "memory of node 0 beside the old generation: lacks 3 GiB"}, "lacks 3 GiB"),
        ({"planner": "crashes"}, "planning failed: killed by SIGABRT"),
    ],
    ids=str,
)
def test_a_reload_that_fails_leaves_the_old_untouched(start, changes: dict, reason: str) -> None:
    toy = start(2)
    toy.log.wait_for("ready: toy")
    before = [toy.ask(worker) for worker in range(2)]
    next_is(toy, counts=[2], contents="other weights", **changes)
    mark = len(toy.log.lines)
    toy.process.send_signal(signal.SIGHUP)
    line = toy.log.wait_for("reload failed: ", after=mark)
    assert reason in line["message"]
    assert [toy.ask(worker) for worker in range(2)] == before
    # The next one is asked for at once, and begins when all of the failed one is gone.
    next_is(toy, counts=[2], contents="good weights")
    reload(toy)
    assert toy.ask(0)["contents"] == "good weights"
    assert segments(toy) == 1


def test_a_reload_while_the_zygote_dies_starts_one_of_its_own(start) -> None:
    toy = start(1)
    toy.log.wait_for("ready: toy")
    zygote = toy.ask(0)["parent"]
    os.kill(zygote, signal.SIGSTOP)
    next_is(toy, counts=[1], contents="new weights")
    toy.process.send_signal(signal.SIGHUP)
    toy.log.wait_for("generation 1 is being loaded")
    os.kill(zygote, signal.SIGKILL)
    toy.log.wait_for("reload: done")
    assert toy.ask(0)["contents"] == "new weights"


def test_hang_ups_during_a_reload_lead_to_one_more(start) -> None:
    toy = start(1)
    toy.log.wait_for("ready: toy")
    next_is(toy, counts=[1])
    toy.process.send_signal(signal.SIGHUP)
    toy.log.wait_for("generation 1 is being loaded")
    for _ in range(3):
        mark = len(toy.log.lines)
        toy.process.send_signal(signal.SIGHUP)
        toy.log.wait_for("SIGHUP: reload", after=mark)
    toy.log.wait_for("reload: done", after=len(toy.log.lines))
    mark = len(toy.log.lines)
    toy.process.send_signal(signal.SIGTERM)
    assert toy.process.wait(30) == 0
    assert toy.loads() in (2, 3)


def test_workers_are_added_and_removed_over_the_same_weights(start) -> None:
    toy = start(1)
    toy.log.wait_for("ready: toy")
    next_is(toy)
    for number, workers in ((signal.SIGTTIN, 2), (signal.SIGTTIN, 3), (signal.SIGTTOU, 2)):
        mark = len(toy.log.lines)
        toy.process.send_signal(number)
        toy.log.wait_for(f"scale to {workers} workers: done", after=mark)
        answers = [toy.ask(worker) for worker in range(workers)]
        assert len({answer["pid"] for answer in answers}) == workers
        assert segments(toy) == 1
    assert toy.loads() == 1


def hold_a_reload(toy) -> int:
    """Begin a reload that stays under way until the zygote, whose pid is returned, gets SIGCONT."""
    zygote = toy.ask(0)["parent"]
    os.kill(zygote, signal.SIGSTOP)
    next_is(toy, counts=[1])
    toy.process.send_signal(signal.SIGHUP)
    toy.log.wait_for("generation 1 is being loaded")
    return zygote


def test_a_server_told_to_stop_during_a_reload_ends_in_order(start) -> None:
    toy = start(1)
    toy.log.wait_for("ready: toy")
    hold_a_reload(toy)
    toy.process.send_signal(signal.SIGTERM)
    assert toy.process.wait(30) == 0
    assert not toy.runtime_dir.exists()


def test_a_new_launcher_takes_segments_over_and_the_old_one_ends(start) -> None:
    toy = start(2)
    toy.log.wait_for("ready: toy")
    before = toy.ask(0)
    for generation in (1, 2):
        successor = start(2, take_over=True)
        successor.log.wait_for("ready: toy")
        assert toy.process.wait(30) == 0
        answers = [successor.ask(worker) for worker in range(2)]
        assert {answer["generation"] for answer in answers} == {generation}
        assert {answer["contents"] for answer in answers} == {before["contents"]}
        wait_until_gone([before["pid"], before["parent"]])
        assert segments(successor) == 1
        toy, before = successor, answers[0]
    assert toy.loads() == 1
    next_is(toy, counts=[1], contents="new weights")
    reload(toy)
    assert toy.ask(0)["contents"] == "new weights"
    toy.process.send_signal(signal.SIGTERM)
    assert toy.process.wait(30) == 0
    assert not toy.runtime_dir.exists()


@pytest.mark.parametrize("fault", ["fails its trial", "crashes"])
def test_a_new_launcher_that_fails_leaves_the_old_one_serving(start, fault: str) -> None:
    toy = start(1)
    toy.log.wait_for("ready: toy")
    before = toy.ask(0)
    successor = start(1, take_over=True, worker=fault)
    assert successor.process.wait(30) in (2, 3)
    toy.log.wait_for("is gone; this server goes on")
    assert toy.ask(0) == before
    next_is(toy, counts=[1], contents="new weights")
    reload(toy)
    assert toy.ask(0)["contents"] == "new weights"


def test_nothing_is_handed_over_during_a_reload_and_no_reload_begins_during_a_hand_over(start) -> None:
    toy = start(1)
    toy.log.wait_for("ready: toy")
    zygote = hold_a_reload(toy)
    assert start(1, take_over=True).process.wait(30) == 1
    assert "is being changed" in toy.log.wait_for("handed nothing over")["message"]
    os.kill(zygote, signal.SIGCONT)
    toy.log.wait_for("reload: done")
    inheritance = take_over(toy.runtime_dir, "0")
    inheritance.connection.send(READY)
    assert inheritance.connection.recv(100) == GO
    mark = len(toy.log.lines)
    toy.process.send_signal(signal.SIGHUP)
    toy.log.wait_for("SIGHUP: reload", after=mark)
    assert not any("planning" in line["message"] for line in toy.log.lines[mark:])
    inheritance.connection.close()
    toy.log.wait_for("reload: done", after=mark)
