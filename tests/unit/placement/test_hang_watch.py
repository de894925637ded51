"""Which silence means that a worker hangs."""

import os
import time

import pytest

from placement.hang_watch import HangWatch, Liveness, cpu_seconds


def look_every_second(watch: HangWatch, seconds: int, heartbeat: int, share: float) -> Liveness:
    for second in range(1, seconds + 1):
        verdict = watch.look(float(second), heartbeat, share * second)
        if verdict is Liveness.HUNG:
            break
    return verdict


@pytest.mark.parametrize(
    ("seconds", "cpu_share", "verdict"),
    [
        (10, 0.0, Liveness.ALIVE),
        (11, 0.0, Liveness.HUNG),
        (11, 0.1, Liveness.HUNG),
        (11, 2.0, Liveness.COMPUTING),
        (100, 2.0, Liveness.COMPUTING),
        (101, 2.0, Liveness.HUNG),
    ],
)
def test_silence_is_judged_by_the_cpu_time_that_is_used_in_it(
    seconds: int, cpu_share: float, verdict: Liveness
) -> None:
    assert look_every_second(HangWatch(10.0), seconds, 5, cpu_share) is verdict


def test_a_worker_that_beats_lives_for_ever() -> None:
    watch = HangWatch(10.0)
    assert {watch.look(float(second), second // 9, 0.0) for second in range(1, 500)} == {Liveness.ALIVE}


def test_a_watcher_that_was_stopped_itself_starts_over() -> None:
    watch = HangWatch(10.0)
    assert watch.look(1.0, 5, 0.0) is Liveness.ALIVE
    assert watch.look(1000.0, 5, 0.0) is Liveness.ALIVE
    assert watch.silence(1003.0) == 3.0


def test_cpu_time_grows_with_use_and_is_0_for_the_dead() -> None:
    before = cpu_seconds(os.getpid())
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    assert cpu_seconds(os.getpid()) >= before + 0.02
    assert cpu_seconds(2**22 + 1) == 0.0
