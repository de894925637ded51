"""Brings one generation after another into service: planned, loaded, tried, switched to, and the old one freed.

Changes run one at a time. A change that fails leaves the generation that serves untouched.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from placement.generation import Blueprint, Generation
from placement.messages import ZygoteConfig
from placement.orders import OrderDone, Planned, PlanOrder, PlanRefused, ReloadOrder, ScaleOrder
from placement.plan import UnitPlan
from placement.plan_codec import plan_from_json
from placement.planner import Planner
from placement.surroundings import EXIT_BAD_CONFIGURATION, Surroundings
from placement.unit import KeptSegment

log = logging.getLogger("numaserve.launcher")

_PAGE_BYTES = 4096
_MOST_WAITING = 16


class Phase(enum.Enum):
    """How far a change is."""

    PLANNING = "planning"
    LOADING = "loading"
    SWITCHING = "switching"
    DRAINING = "draining"
    UNDOING = "undoing"


@dataclass
class Change:
    """One change: what is asked, who is told, and how far it is."""

    order: ReloadOrder | ScaleOrder
    done: Callable[[OrderDone], None]
    phase: Phase = Phase.PLANNING
    began: float = field(default_factory=time.monotonic)
    outcome: OrderDone | None = None
    notes: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        """In a word or two, for logs and status."""
        return "reload" if isinstance(self.order, ReloadOrder) else f"scale to {self.order.workers} workers"


@dataclass(frozen=True)
class SuccessionConfig:
    """What every generation shares. `plan_entry` is called with a PlanOrder, `plan_request` is its own JSON."""

    zygote_config: Callable[[UnitPlan, Blueprint, int], ZygoteConfig]
    plan_entry: str
    plan_request: str
    drain_timeout: float
    hang_timeout: float


class Succession:
    """The generations of one server. No change begins while it is `held`.

    The first one, numbered `number`, may be on trial too: then a server before this one goes on if it fails, and
    `tried` is called when all its workers could listen; `begin_first` lets them.
    """

    def __init__(
        self,
        config: SuccessionConfig,
        surroundings: Surroundings,
        first: Blueprint,
        number: int = 0,
        kept: Mapping[str, KeptSegment] | None = None,
        on_trial: bool = False,
        tried: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._around = surroundings
        self._tell_tried: Callable[[], None] | None = tried
        self._waiting: deque[Change] = deque()
        self._planner: Planner | None = None
        self.change: Change | None = None
        self.last_error = ""
        self.current = Generation(
            number, first, config.zygote_config, surroundings, surroundings.give_up, kept, on_trial
        )
        self.coming: Generation | None = None
        self.leaving: list[Generation] = []
        self.held = False
        self._draining = False
        self._scaled_to = 0

    def __iter__(self) -> Iterator[Generation]:
        """All generations that live, the serving one first."""
        yield self.current
        if self.coming is not None:
            yield self.coming
        yield from self.leaving

    @property
    def pids(self) -> list[int]:
        """Every process but the launcher's and the control process."""
        planner = [self._planner.pid] if self._planner is not None else []
        return [*planner, *(pid for generation in self for pid in generation.pids)]

    def start(self) -> None:
        """Start the first generation."""
        self.current.start()

    def turn(self, now: float) -> None:
        """Let every generation go on, and the change under way."""
        for generation in self:
            generation.turn(now, self._config.hang_timeout)
        self.leaving = [generation for generation in self.leaving if not generation.ended]
        self._go_on()

    def next_timer(self) -> float | None:
        """When `turn` is to be called again at the latest."""
        timers = [timer for generation in self if (timer := generation.next_timer()) is not None]
        return min(timers, default=None)

    def drain(self, timeout: float) -> None:
        """The whole server stops."""
        self._refuse_all("the server stops")
        for generation in self:
            generation.drain(timeout)

    def on_exit(self, pid: int, status: int) -> bool:
        """Act on the death of a process; False when it is nobody's here."""
        if self._planner is not None and pid == self._planner.pid:
            planner, self._planner = self._planner, None
            planner.on_exit(status)
            return True
        return any(generation.on_exit(pid, status) for generation in self)

    # Changes

    def ask(self, order: ReloadOrder | ScaleOrder, done: Callable[[OrderDone], None]) -> None:
        """Make a change once those asked for before are through; `done` is called with what became of it."""
        if self._draining or not self._config.plan_entry:
            why = "the server stops" if self._draining else "this server cannot be changed"
            done(OrderDone(order.number, "FAILED_PRECONDITION", "", why))
        elif len(self._waiting) >= _MOST_WAITING:
            why = f"{_MOST_WAITING} changes wait already"
            done(OrderDone(order.number, "RESOURCE_EXHAUSTED", "", why))
        else:
            self._waiting.append(Change(order, done))

    @property
    def at_rest(self) -> bool:
        """All workers serve, and no change is under way or waits."""
        return self.current.serving and self.change is None and not self._waiting and not self._draining

    @property
    def draining(self) -> bool:
        """The server stops, or another one has taken over."""
        return self._draining

    @property
    def reload_waits(self) -> bool:
        """A reload has been asked for that has not begun, so that another one would find nothing newer."""
        return any(
            isinstance(change.order, ReloadOrder) and not change.order.model_dir for change in self._waiting
        )

    @property
    def wanted_workers(self) -> int:
        """Workers that there will be when all changes asked for are through."""
        changes = [self.change, *self._waiting]
        asked = [
            change.order.workers for change in changes if change and isinstance(change.order, ScaleOrder)
        ]
        return asked[-1] if asked else len(self.current.places)

    def retire(self, timeout: float) -> None:
        """Another launcher serves: let one worker after the other leave."""
        self._refuse_all("another launcher serves now")
        self.current.leave(timeout)

    def _refuse_all(self, why: str) -> None:
        self._draining = True
        for change in (self.change, *self._waiting):
            if change is not None:
                change.done(OrderDone(change.order.number, "UNAVAILABLE", "", why))
        self._waiting.clear()
        self.change = None

    def _go_on(self) -> None:
        if self._draining:
            return
        if self.current.on_trial:
            self._start_first()
            return
        change = self.change
        if change is None:
            if self._waiting and self.current.serving and not self.leaving and not self.held:
                self._begin(self._waiting.popleft())
        elif change.phase is Phase.LOADING and self.coming is not None and self.coming.tried:
            self._enter(Phase.SWITCHING)
            self.coming.begin_to_serve()
        elif change.phase is Phase.SWITCHING and self.coming is not None and self.coming.serving:
            self._promote(change, self.coming)
        elif change.phase in (Phase.DRAINING, Phase.UNDOING) and not self.leaving:
            self._finish(change)
            # One that waited begins now: no event need come that would start another turn.
            self._go_on()

    def _start_first(self) -> None:
        if self.current.serving:
            self.current.accept()
            self._around.changed()
        elif self.current.tried and self._tell_tried is not None:
            tell, self._tell_tried = self._tell_tried, None
            tell()

    def begin_first(self) -> None:
        """Let the workers of a first generation that was on trial listen."""
        self.current.begin_to_serve()

    def _enter(self, phase: Phase) -> None:
        assert self.change is not None
        self.change.phase = phase
        self._around.changed()

    def _begin(self, change: Change) -> None:
        self.change = change
        change.began = time.monotonic()
        log.info("%s: planning generation %d", change.what, self.current.number + 1)
        scaling = isinstance(change.order, ScaleOrder)
        # All units hold the same weights: one says how large the model is.
        stays = [segment.fd for segment in self.current.segments().values()][:1] if scaling else []
        self._planner = Planner(self._around.events, self._plan_order(change.order), stays, self._on_plan)
        self._around.changed()

    def _plan_order(self, order: ReloadOrder | ScaleOrder) -> PlanOrder:
        blueprint, segments = self.current.blueprint, self.current.segments().values()
        pages = tuple(
            (node, count * _PAGE_BYTES) for segment in segments for node, count in segment.built.pages
        )
        scaling = isinstance(order, ScaleOrder)
        return PlanOrder(
            entry=self._config.plan_entry,
            plan_request=self._config.plan_request,
            service_config=blueprint.service_config,
            model_dir="" if isinstance(order, ScaleOrder) else order.model_dir,
            workers=order.workers if isinstance(order, ScaleOrder) else self._scaled_to,
            policy=blueprint.plan.policy.value if scaling else "",
            kept_bytes=pages if scaling else (),
            freed_bytes=() if scaling else pages,
            processes=tuple(
                (pid, unit.plan.memory_nodes) for unit in self.current.units for pid in unit.pids
            ),
        )

    def _on_plan(self, answer: Planned | PlanRefused) -> None:
        if self.change is None:
            return
        if isinstance(answer, PlanRefused):
            self._fail(answer.code, answer.field, answer.message)
            return
        plan = plan_from_json(answer.plan)
        for note in plan.notes:
            log.info("plan: %s", note)
        self.change.notes = plan.notes
        scaling = isinstance(self.change.order, ScaleOrder)
        kept = self.current.segments() if scaling else {}
        names = {unit.name for unit in plan.units}
        drained = () if scaling else [place.plan.index for place in self.current.places if place.drained]
        coming = Generation(
            self.current.number + 1,
            Blueprint(plan, answer.service_config, answer.model_dir, answer.model_files),
            self._config.zygote_config,
            self._around,
            lambda status, reason: self._on_failure(coming, status, reason),
            {name: segment.duplicate() for name, segment in kept.items() if name in names},
            on_trial=True,
            drained=drained,
        )
        self.coming = coming
        log.info("%s: generation %d is being loaded", self.change.what, coming.number)
        self._enter(Phase.LOADING)
        coming.start(self.current)

    def _on_failure(self, generation: Generation, status: int, reason: str) -> None:
        if generation is self.current:
            self._around.give_up(status, reason)
        elif generation is self.coming:
            bad = status == EXIT_BAD_CONFIGURATION
            self._fail("FAILED_PRECONDITION" if bad else "ABORTED", "", reason)

    def _fail(self, code: str, field: str, message: str) -> None:
        assert self.change is not None
        log.error("%s failed: %s; generation %d goes on", self.change.what, message, self.current.number)
        self.last_error = message
        self.change.outcome = OrderDone(
            self.change.order.number, code, field, message, self.current.number, self.change.notes
        )
        if self.coming is not None:
            self.coming.discard(self._config.drain_timeout)
            self.leaving.append(self.coming)
            self.coming = None
        self._enter(Phase.UNDOING)

    def _promote(self, change: Change, coming: Generation) -> None:
        coming.accept()
        old, self.current, self.coming = self.current, coming, None
        log.info(
            "%s: generation %d serves, %d workers, %.1f s after the order; generation %d drains",
            change.what,
            coming.number,
            len(coming.wanted),
            time.monotonic() - change.began,
            old.number,
        )
        old.leave(self._config.drain_timeout)
        self.leaving.append(old)
        self.last_error = ""
        if isinstance(change.order, ScaleOrder):
            self._scaled_to = change.order.workers
        change.outcome = OrderDone(change.order.number, generation=coming.number, notes=change.notes)
        self._enter(Phase.DRAINING)

    def _finish(self, change: Change) -> None:
        assert change.outcome is not None
        if not change.outcome.code:
            log.info(
                "%s: done, %.1f s after the order; the old generation's memory is free",
                change.what,
                time.monotonic() - change.began,
            )
        self.change = None
        change.done(change.outcome)
        self._around.changed()
