"""Which worker a request goes to."""

from collections import Counter
from dataclasses import replace

import pytest

from service.relay.choice import Candidate, choose

HERE = Candidate(0, 0, is_local=True)


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([HERE, Candidate(1, 0)], 0),
        ([replace(HERE, load=1), Candidate(1, 0)], 1),
        ([replace(HERE, load=1), Candidate(1, 1)], 0),
        # Another node: one less is not enough, two less are; further away it takes three.
        ([replace(HERE, load=1), Candidate(1, 0, distance=21)], 0),
        ([replace(HERE, load=2), Candidate(1, 0, distance=21)], 1),
        ([replace(HERE, load=2), Candidate(1, 0, distance=32)], 0),
        ([replace(HERE, load=3), Candidate(1, 0, distance=32)], 1),
        # The same unit first.
        ([replace(HERE, load=5), Candidate(1, 1, distance=21), Candidate(2, 1)], 2),
        # A cached prefix decides where loads are alike, and not where they differ.
        ([HERE, Candidate(1, 0, cached_share=0.9)], 1),
        ([HERE, Candidate(1, 2, cached_share=1.0)], 0),
        ([replace(HERE, load=40), Candidate(1, 42, cached_share=0.9)], 1),
        ([replace(HERE, cached_share=0.9), Candidate(1, 0)], 0),
        ([replace(HERE, load=1, cached_share=0.9), Candidate(1, 0)], 0),
        # No room for the prompt.
        ([replace(HERE, has_room=False), Candidate(1, 9)], 1),
        ([replace(HERE, has_room=False), Candidate(1, 9, has_room=False)], 0),
    ],
)
def test_the_choice(candidates: list[Candidate], chosen: int) -> None:
    assert choose(candidates).worker == chosen


@pytest.mark.parametrize("cached", [0.0, 0.9])
@pytest.mark.parametrize("distances", [(10, 10, 10, 10), (10, 10, 21, 21)])
def test_32_requests_that_arrive_at_one_of_four_spread_within_15_percent(
    distances: tuple[int, ...], cached: float
) -> None:
    loads: Counter[int] = Counter()
    for _ in range(32):
        candidates = [
            Candidate(worker, loads[worker], worker == 0, distance, cached if worker == 1 else 0.0)
            for worker, distance in enumerate(distances)
        ]
        loads[choose(candidates).worker] += 1
    assert all(abs(loads[worker] - 8) <= 0.15 * 8 for worker in range(4)), loads
