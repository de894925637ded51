"""A segment that lies elsewhere than wanted is repaired by a reload: asked for once, and only where a repair is wanted."""

from __future__ import annotations

from typing import Any

import pytest

import service.control
from numaserve.v1 import control_pb2
from placement.board import Board
from placement.orders import OrderDone, ReloadOrder
from service.control import ControlServicer


class Launcher:
    """Takes orders in the launcher's stead and says at once that they are done."""

    def __init__(self) -> None:
        self.orders: list[ReloadOrder] = []
        self.servicer: Any = None

    def send(self, order: ReloadOrder) -> None:
        self.orders.append(order)
        self.servicer.on_done(OrderDone(order.number, generation=7))


def answer(segment_is_local: bool) -> control_pb2.VerifyResponse:
    return control_pb2.VerifyResponse(
        checks=[
            control_pb2.PlacementCheck(kind="segment", unit="node0", worker=-1, local=segment_is_local),
            control_pb2.PlacementCheck(kind="kv_cache", unit="node0", local=True, repair="8 pages moved"),
        ],
        sound=segment_is_local,
    )


@pytest.fixture
def launcher() -> Launcher:
    told = Launcher()
    told.servicer = ControlServicer(Board.create(1), told)  # type: ignore[arg-type]
    told.servicer.state = "some state"
    return told


def measured(monkeypatch: pytest.MonkeyPatch, *answers: control_pb2.VerifyResponse) -> list[bool]:
    """What `verify` finds, one answer after the other; the list tells which of its calls were to repair."""
    left, repairs = list(answers), []

    def verify(_state: object, _read_row: object, repair: bool) -> control_pb2.VerifyResponse:
        repairs.append(repair)
        return left.pop(0)

    monkeypatch.setattr(service.control, "verify", verify)
    return repairs


async def test_a_misplaced_segment_is_loaded_anew(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    repairs = measured(monkeypatch, answer(False), answer(True))
    found = await launcher.servicer.Verify(control_pb2.VerifyRequest(repair=True), None)
    assert [type(order) for order in launcher.orders] == [ReloadOrder]
    assert launcher.orders[0].model_dir == ""
    assert repairs == [True, True]
    assert found.sound
    assert [check.repair for check in found.checks] == [
        "the weights were loaded anew, as generation 7",
        "8 pages moved",
    ]


@pytest.mark.parametrize(("repair", "local"), [(True, True), (False, False), (False, True)])
async def test_nothing_is_loaded_where_nothing_is_wrong_or_no_repair_is_wanted(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, repair: bool, local: bool
) -> None:
    measured(monkeypatch, answer(local))
    found = await launcher.servicer.Verify(control_pb2.VerifyRequest(repair=repair), None)
    assert launcher.orders == []
    assert found.sound == local
