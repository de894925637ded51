"""When a worker's place is filled again."""

import pytest

from placement.places import LONGEST_BACKOFF_SECONDS, PROVEN_SECONDS, Place
from placement.plan import WorkerPlan


@pytest.fixture
def place() -> Place:
    return Place(WorkerPlan(0, "node0", (0,), 1, 1 << 20), pid=100)


def test_the_first_death_is_made_good_at_once(place: Place) -> None:
    place.began_to_serve(5.0, "unix:/w")
    place.fell_empty(6.0)
    assert place.empty
    assert place.not_before == 6.0
    assert (place.restarts, place.died_pid) == (1, 100)
    assert place.began_to_serve(6.4, "unix:/w") == pytest.approx(0.4)


def test_deaths_in_quick_succession_wait_longer_each_time_up_to_a_limit(place: Place) -> None:
    waits = []
    for start in range(12):
        place.pid = 100 + start
        place.began_to_serve(start, "unix:/w")
        place.fell_empty(start + 1)
        waits.append(place.not_before - (start + 1))
    assert waits[:4] == pytest.approx([0.0, 0.1, 0.2, 0.4])
    assert waits == sorted(waits)
    assert waits[-1] == LONGEST_BACKOFF_SECONDS


def test_a_worker_that_served_long_starts_over_with_no_delay(place: Place) -> None:
    for start in range(5):
        place.began_to_serve(start, "unix:/w")
        place.fell_empty(start + 0.5)
    place.began_to_serve(100.0, "unix:/w")
    place.fell_empty(100.0 + PROVEN_SECONDS)
    assert place.not_before == 100.0 + PROVEN_SECONDS


def test_failed_starts_are_counted_until_one_succeeds(place: Place) -> None:
    place.fell_empty(1.0)
    place.fell_empty(2.0)
    assert place.failed_starts == 2
    assert place.began_to_serve(3.0, "unix:/w") is None
    assert place.failed_starts == 0
