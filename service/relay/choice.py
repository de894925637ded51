"""Which worker a request goes to. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Handing over costs little, yet something: between equals a request stays where it arrived.
_HANDOVER = 0.5
# Loads that differ by this share, or by one and a half completions, are alike: a cached prefix decides between them.
_ALIKE_SHARE = 0.1
_ALIKE_COMPLETIONS = 1.5
_LOCAL_DISTANCE = 10


@dataclass(frozen=True)
class Candidate:
    """A worker that may take a request.

    `load` counts the completions that run or wait there. `distance` is that of its node as in the ACPI SLIT (10 is
    local). `cached_share` is the part of the prompt that its cache holds, `has_room` whether its free blocks can
    take the prompt.
    """

    worker: int
    load: int
    is_local: bool = False
    distance: int = _LOCAL_DISTANCE
    cached_share: float = 0.0
    has_room: bool = True


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """The worker with clearly more room: of the same unit with one completion less, further away with a margin.

    Whoever has no room for the prompt comes after all who have.
    """
    mean_load = sum(candidate.load for candidate in candidates) / len(candidates)
    alike = max(_ALIKE_COMPLETIONS, _ALIKE_SHARE * mean_load)

    def cost(candidate: Candidate) -> tuple[bool, float, int]:
        handover = 0.0 if candidate.is_local else _HANDOVER
        way = (candidate.distance - _LOCAL_DISTANCE) / 10
        return (
            not candidate.has_room,
            candidate.load + handover + way - alike * candidate.cached_share,
            candidate.worker,
        )

    return min(candidates, key=cost)
