"""2 nodes x 1 CPU and a third node that has memory and no CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from guests import Guest, needs_guests
from placement_checks import check_bound, check_host

pytestmark = [needs_guests, pytest.mark.timeout(1500)]

GUEST = Guest(
    name="memory-only",
    options=("--nodes=2", "--cpus-per-node=1", "--memory-only-node", "--mem-per-node=1536"),
    program="guest_memory_only_node.py",
    timeout=800,
)


@pytest.fixture(scope="module")
def facts(boot: Callable[[Guest], dict[str, Any]]) -> dict[str, Any]:
    return boot(GUEST)


def test_the_host_is_read_as_numactl_reads_it(facts: dict[str, Any]) -> None:
    check_host(facts["describe_host"])
    assert facts["describe_host"]["numactl"]["2"]["cpus"] == []


def test_no_worker_lives_there_and_its_memory_is_left_alone(facts: dict[str, Any]) -> None:
    units = facts["plans"]["default"]["plan"]["units"]
    assert [(unit["nodes"], unit["memory_nodes"]) for unit in units] == [([0], [0]), ([1], [1])]
    refused = facts["plans"]["on_2"]
    assert refused["status"] == 1
    (refusal,) = refused["plan"]["refusals"]
    assert refusal["subject"] == "--nodes"
    assert "no CPU there to house a worker" in refusal["reason"]


def test_its_memory_is_used_when_asked_for(facts: dict[str, Any]) -> None:
    check_bound(facts["membind"], {"node0": "0"}, {"node0": 2}, membind=True)
