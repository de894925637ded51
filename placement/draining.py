"""Drains single workers or those of a node on request, and fills their places again on request."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from placement.crew import KILL_MARGIN_SECONDS
from placement.generation import Generation
from placement.orders import DrainOrder, OrderDone
from placement.places import Place
from placement.succession import Succession


@dataclass
class _Waiting:
    """An order until it is carried out."""

    order: DrainOrder
    generation: Generation
    places: list[Place]
    answer: Callable[[OrderDone], None]
    until: float


class Drains:
    """Carries out drain orders on the generation that serves. Drained places stay so over a reload."""

    def __init__(self, succession: Succession, drain_timeout: float) -> None:
        self._succession = succession
        self._drain_timeout = drain_timeout
        self._waiting: list[_Waiting] = []

    def ask(self, order: DrainOrder, answer: Callable[[OrderDone], None]) -> None:
        """Drain, or undo it; `answer` is called when the workers have ended, or serve again."""
        generation = self._succession.current
        places = self._named(order, generation)
        refusal = self._refusal(order, generation, places)
        if refusal is not None:
            answer(refusal)
            return
        for place in places:
            place.drained = not order.undo
        for unit in generation.units:
            for place in unit.crew.places:
                if place in places and not order.undo:
                    unit.crew.drain_place(place, self._drain_timeout, leave_port=True)
        until = time.monotonic() + self._drain_timeout + 2 * KILL_MARGIN_SECONDS
        self._waiting.append(_Waiting(order, generation, places, answer, until))

    def _named(self, order: DrainOrder, generation: Generation) -> list[Place]:
        if order.worker >= 0:
            return [place for place in generation.places if place.plan.index == order.worker]
        return [place for place in generation.places if order.node in _nodes(place)]

    def _refusal(self, order: DrainOrder, generation: Generation, places: list[Place]) -> OrderDone | None:
        if not places:
            field = "worker" if order.worker >= 0 else "node"
            known = (
                f"0 to {len(generation.places) - 1}"
                if order.worker >= 0
                else ", ".join(sorted({str(node) for place in generation.places for node in _nodes(place)}))
            )
            asked = order.worker if order.worker >= 0 else order.node
            text = f"there is no {field} {asked}; there are {known}"
            return OrderDone(order.number, "INVALID_ARGUMENT", field, text)
        if self._succession.change is not None:
            text = f"a {self._succession.change.what} is under way; ask again when it is through"
            return OrderDone(order.number, "FAILED_PRECONDITION", "", text)
        if not order.undo and not [
            place for place in generation.wanted if place.serving and place not in places
        ]:
            text = "no other worker serves; to stop the server, send SIGTERM to its launcher"
            return OrderDone(order.number, "FAILED_PRECONDITION", "", text)
        return None

    def turn(self, now: float) -> None:
        """Answer the orders that are carried out."""
        for waiting in list(self._waiting):
            if self._is_through(waiting):
                code, text = "", ""
            elif waiting.until <= now:
                code, text = "DEADLINE_EXCEEDED", "it goes on; see the status"
            else:
                continue
            self._waiting.remove(waiting)
            waiting.answer(OrderDone(waiting.order.number, code, "", text, self._succession.current.number))

    def next_timer(self) -> float | None:
        """When `turn` is to be called again at the latest."""
        return min((waiting.until for waiting in self._waiting), default=None)

    def _is_through(self, waiting: _Waiting) -> bool:
        if waiting.generation is not self._succession.current:
            return True
        if waiting.order.undo:
            return all(place.serving or place.drained for place in waiting.places)
        return all(place.empty or not place.drained for place in waiting.places)


def _nodes(place: Place) -> tuple[int, ...]:
    """The nodes that a worker belongs to: those of its memory."""
    return place.plan.memory_nodes or (-1,)
