"""The answer of the Verify call: what `placement.verification` finds, as messages."""

from __future__ import annotations

from collections.abc import Callable

from numaserve.v1 import control_pb2
from placement.board import BoardRow
from placement.messages import ServerState
from placement.residency import Residency
from placement.verification import Check, repair_cache, verify_cache, verify_segments


def verify(
    state: ServerState, read_row: Callable[[int], BoardRow], repair: bool
) -> control_pb2.VerifyResponse:
    """Measure every segment and every worker's KV cache; with `repair`, move misplaced pages of caches and measure again.

    The kernel does not move pages that several processes map: see `misplaced_segments`. `read_row` gives a row of the
    board, whatever for -1. It takes milliseconds per GiB.
    """
    checks = []
    for check in verify_segments(state):
        checks.append(_message(check, ""))
    for place in state.workers:
        row, repaired = read_row(place.row), ""
        check = verify_cache(place, row)
        if repair and check.sights and not check.verdict.local:
            repaired = str(repair_cache(place, row))
            check = verify_cache(place, row)
        checks.append(_message(check, repaired))
    return control_pb2.VerifyResponse(checks=checks, sound=all(check.local for check in checks))


def misplaced_segments(answer: control_pb2.VerifyResponse) -> list[control_pb2.PlacementCheck]:
    """The segments that have pages elsewhere than wanted; only loading the weights anew can place them."""
    return [check for check in answer.checks if check.kind == "segment" and not check.local]


def node_pages(residency: Residency) -> list[control_pb2.NodePages]:
    """Pages per node, in the order of the nodes."""
    return [control_pb2.NodePages(node=node, pages=pages) for node, pages in residency.pages.items()]


def _message(check: Check, repaired: str) -> control_pb2.PlacementCheck:
    return control_pb2.PlacementCheck(
        kind="segment" if check.worker < 0 else "kv_cache",
        unit=check.unit,
        worker=check.worker,
        nodes=check.nodes,
        verdict=check.verdict.kind.value,
        explanation=check.verdict.explanation,
        local=check.verdict.local,
        processes=[
            control_pb2.ProcessPages(
                pid=sight.pid,
                pages=node_pages(sight.residency),
                untouched=sight.residency.untouched,
                unknown=sight.residency.unknown,
                method=sight.residency.method.value,
            )
            for sight in check.sights
        ],
        repair=repaired,
    )
