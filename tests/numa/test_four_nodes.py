"""4 nodes x 1 CPU at uneven distances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from guests import Guest, needs_guests
from placement_checks import check_bound, check_host

pytestmark = [needs_guests, pytest.mark.timeout(1500)]

DISTANCES = "0,1=12 2,3=12 0,2=21 0,3=21 1,2=21 1,3=21"
GUEST = Guest(
    name="four-nodes",
    options=("--nodes=4", "--cpus-per-node=1", "--mem-per-node=1280", f"--distances={DISTANCES}"),
    program="guest_four_nodes.py",
    timeout=1000,
)


@pytest.fixture(scope="module")
def facts(boot: Callable[[Guest], dict[str, Any]]) -> dict[str, Any]:
    return boot(GUEST)


def test_the_host_is_read_as_numactl_reads_it(facts: dict[str, Any]) -> None:
    check_host(facts["describe_host"])
    assert facts["describe_host"]["distances"]["0"] == [10, 12, 21, 21]


def test_each_node_has_its_own_bound_copy(facts: dict[str, Any]) -> None:
    units = range(4)
    check_bound(
        facts["replicate"],
        {f"node{node}": str(node) for node in units},
        {f"node{node}": node for node in units},
    )


def test_a_request_that_meets_a_busy_worker_goes_to_the_near_sibling(facts: dict[str, Any]) -> None:
    relayed = facts["replicate"]["relayed"]
    assert relayed["0"] == {"first": 0, "second": 1, "nodes": [1]}
    assert relayed["2"] == {"first": 2, "second": 3, "nodes": [3]}


def test_workers_need_not_be_a_multiple_of_the_nodes(facts: dict[str, Any]) -> None:
    plans = facts["plans"]
    homes = {
        name: [unit["name"] for unit in plans[name]["plan"]["units"] for _ in unit["workers"]]
        for name in ("three", "six", "not_0")
    }
    assert homes["three"] == ["node0", "node1", "node2"]
    assert homes["six"] == ["node0", "node0", "node1", "node1", "node2", "node3"]
    assert homes["not_0"] == ["node1", "node2", "node3"]
