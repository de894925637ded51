"""A generation: one set of units over one set of weights, from its start to the return of its memory."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from placement.messages import ZygoteConfig
from placement.places import Place
from placement.plan import Plan, UnitPlan
from placement.progress import LoadProgressView
from placement.surroundings import Surroundings
from placement.unit import KeptSegment, Unit

# The next worker leaves when the one before has ended, or after so long: streams may run for minutes.
_STAGGER_SECONDS = 1.0


@dataclass(frozen=True)
class Blueprint:
    """What a generation is made from. `service_config` is opaque JSON for the entry points.

    `model_files` is JSON of the service's own that tells one state of the checkpoint's files from another.
    """

    plan: Plan
    service_config: str
    model_dir: str = ""
    model_files: str = ""


class Generation:
    """Units that start, serve, and leave together. `number` counts the generations of the server.

    `zygote_config` makes what a unit's zygote is told. `kept` are segments by unit name that exist already. While it is
    on trial nobody knows of its workers, and the first failure gives it up.
    """

    def __init__(
        self,
        number: int,
        blueprint: Blueprint,
        zygote_config: Callable[[UnitPlan, Blueprint, int], ZygoteConfig],
        surroundings: Surroundings,
        give_up: Callable[[int, str], None],
        kept: Mapping[str, KeptSegment] | None = None,
        on_trial: bool = False,
        drained: Collection[int] = (),
    ) -> None:
        self.number = number
        self.blueprint = blueprint
        self.on_trial = on_trial
        around = replace(surroundings, give_up=give_up, progress=LoadProgressView())
        self.units = [
            Unit(
                unit,
                zygote_config(unit, blueprint, number),
                around,
                (kept or {}).get(unit.name),
                on_trial,
                drained,
            )
            for unit in blueprint.plan.units
        ]
        self._leave_timeout: float | None = None
        self._next_leaves_at = 0.0
        self._ending = False
        self._told_to_serve = False

    @property
    def places(self) -> list[Place]:
        """Those of all units, in the order of their numbers."""
        return [place for unit in self.units for place in unit.crew.places]

    @property
    def wanted(self) -> list[Place]:
        """The places that are to be filled."""
        return [place for place in self.places if not place.drained]

    @property
    def loaded(self) -> bool:
        """Every unit has its weights."""
        return all(unit.loaded for unit in self.units)

    @property
    def tried(self) -> bool:
        """Every worker has passed its trial."""
        return self.loaded and all(place.tried for place in self.wanted)

    @property
    def serving(self) -> bool:
        """Every worker serves."""
        return self.loaded and all(place.serving for place in self.wanted)

    @property
    def pids(self) -> list[int]:
        """Every process of the generation."""
        return [pid for unit in self.units for pid in unit.pids]

    @property
    def ended(self) -> bool:
        """No process is left, and the weights are let go of."""
        return self._ending and not self.pids

    def start(self, parent: Generation | None = None) -> None:
        """Start every unit, from the zygote of the same CPUs in `parent` where there is one."""
        parents = {unit.plan.name: unit for unit in parent.units} if parent is not None else {}
        for unit in self.units:
            unit.start(parents.get(unit.plan.name))

    def begin_to_serve(self) -> None:
        """All have passed their trials: let them listen. Once is enough."""
        if self._told_to_serve:
            return
        self._told_to_serve = True
        for unit in self.units:
            unit.crew.begin_to_serve()

    def accept(self) -> None:
        """It serves: from now on workers that die are replaced."""
        self.on_trial = False
        for unit in self.units:
            unit.crew.on_trial = False

    def turn(self, now: float, hang_timeout: float) -> None:
        """Fill places, look after workers, go on leaving."""
        for unit in self.units:
            unit.turn(now, hang_timeout)
        if self._leave_timeout is not None:
            self._go_on_leaving(now)

    def next_timer(self) -> float | None:
        """When `turn` is to be called again at the latest, CLOCK_MONOTONIC."""
        timers = [start for unit in self.units if (start := unit.next_start()) is not None]
        timers += [place.end_by for place in self.places if place.end_by is not None]
        timers += [place.kill_at for place in self.places if place.kill_at is not None]
        if self._leave_timeout is not None and not self._ending:
            timers.append(self._next_leaves_at)
        return min(timers, default=None)

    def drain(self, timeout: float) -> None:
        """The whole server stops: all finish at once."""
        for unit in self.units:
            unit.discard(timeout, leave_port=False)

    def leave(self, timeout: float) -> None:
        """Others serve: let one worker after the other leave the port and finish, then end what is left."""
        self._leave_timeout = timeout
        for unit in self.units:
            unit.crew.draining = True

    def discard(self, timeout: float) -> None:
        """It failed: end it wholly. Workers that serve already finish what they run."""
        for unit in self.units:
            unit.discard(timeout, leave_port=True)
        self.leave(timeout)

    def _go_on_leaving(self, now: float) -> None:
        assert self._leave_timeout is not None
        alive = [place for place in self.places if not place.empty]
        staying = [place for place in alive if place.pid and place.end_by is None]
        if staying and (len(staying) == len(alive) or self._next_leaves_at <= now):
            place = staying[0]
            unit = next(unit for unit in self.units if place in unit.crew.places)
            unit.crew.drain_place(place, self._leave_timeout, leave_port=True)
            self._next_leaves_at = now + _STAGGER_SECONDS
        if not alive and not self._ending:
            self._ending = True
            for unit in self.units:
                unit.end()

    def on_exit(self, pid: int, status: int) -> bool:
        """Act on the death of a process; False when it is none of this generation's."""
        return any(unit.on_exit(pid, status) for unit in self.units)

    def kill(self) -> None:
        """End every process at once."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def segments(self) -> dict[str, KeptSegment]:
        """The segments that exist, by unit name; their descriptors stay the units'."""
        return {unit.plan.name: unit.segment for unit in self.units if unit.segment is not None}
