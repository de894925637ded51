"""2 nodes x 2 CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from guests import Guest, needs_guests
from placement_checks import check_bound, check_host, check_serving, check_threads

pytestmark = [needs_guests, pytest.mark.timeout(1500)]

GUEST = Guest(
    name="two-nodes",
    options=("--nodes=2", "--cpus-per-node=2", "--mem-per-node=2048"),
    program="guest_two_nodes.py",
    timeout=1200,
    demo=True,
)

CPUS = {"node0": "0-1", "node1": "2-3"}
NODES = {"node0": 0, "node1": 1}


@pytest.fixture(scope="module")
def facts(boot: Callable[[Guest], dict[str, Any]]) -> dict[str, Any]:
    return boot(GUEST)


def test_the_host_is_read_as_numactl_reads_it(facts: dict[str, Any]) -> None:
    check_host(facts["describe_host"])


def test_the_demo_model_has_a_bound_copy_on_each_node(facts: dict[str, Any]) -> None:
    check_bound(facts["demo"], CPUS, NODES)
    assert all(
        segment["pages"][str(NODES[segment["unit"]])] > 60_000 for segment in facts["demo"]["segments"]
    )


def test_replicas_are_local_although_the_page_cache_was_not(facts: dict[str, Any]) -> None:
    found = facts["replicate"]
    check_bound(found, CPUS, NODES)
    assert found["policy"] == "replicate"
    cached = found["page_cache"]
    # The file's first pages were read when the model was planned for.
    assert cached["1"] > 0.95 * sum(cached.values())


def test_a_killed_loader_is_started_again(facts: dict[str, Any]) -> None:
    log = facts["replicate"]["log"]
    killed = next(line for line in log if "the loader ended without a segment" in line)
    assert "killed by SIGKILL" in killed
    assert sum("weights bound" in line for line in log) == 2


def test_pages_that_were_moved_away_are_found_and_put_right(
    facts: dict[str, Any],
) -> None:
    found = facts["replicate"]["misplaced"]
    assert min(found["moved_away"]) > 0
    wrong = {check["worker"]: check for check in found["verify"]["checks"] if not check["local"]}
    assert found["verify"]["status"] == 1
    assert set(wrong) == {-1, 0}
    assert wrong[-1]["verdict"] == wrong[0]["verdict"] == "partly bound"
    assert "the rest on node 1" in wrong[0]["explanation"]
    repaired = [check for check in found["repair"]["checks"] if check["kind"] == "segment"]
    assert found["repair"]["status"] == 0
    assert all(check["local"] and check["verdict"] == "bound" for check in repaired)
    assert {check["repair"] for check in repaired} == {"the weights were loaded anew, as generation 1"}


def test_a_worker_that_was_killed_is_placed_as_before(facts: dict[str, Any]) -> None:
    after = facts["replicate"]["after_kill"]
    check_bound(after, CPUS, NODES)
    assert [worker["restarts"] for worker in after["workers"]] == [0, 1]


def test_with_calls_refused_first_touch_places_and_the_verdict_says_what_is_missing(
    facts: dict[str, Any],
) -> None:
    found = facts["refused_calls"]
    check_serving(found, CPUS, NODES)
    assert found["page_cache"]["1"] > 0.95 * sum(found["page_cache"].values())
    for segment in found["segments"]:
        node = str(NODES[segment["unit"]])
        assert segment["verdict"] == "unbound"
        assert set(segment["pages"]) == {node}
        for words in ("by first touch", "mbind refused (EPERM", "docker run --cap-add SYS_NICE", "numa_maps"):
            assert words in segment["explanation"]
    for worker in found["workers"]:
        assert set(worker["weights_in_numa_maps"]) == {str(NODES[worker["unit"]])}
        assert set(worker["kv_pages"]) == {str(NODES[worker["unit"]])}
        assert worker["kv_verdict"] == "unbound"
        assert "mbind refused (EPERM" in worker["kv_explanation"]
    assert found["verify"]["status"] == 0


def test_page_cache_on_the_wrong_node_is_read_again_where_it_is_shared(facts: dict[str, Any]) -> None:
    found = facts["shared_files"]
    check_serving(found, CPUS, NODES)
    assert found["policy"] == "shared"
    assert found["page_cache"]["1"] > 0.95 * sum(found["page_cache"].values())
    (segment,) = found["segments"]
    assert segment["verdict"] == "unbound"
    assert "in the page cache of the checkpoint" in segment["explanation"]
    assert set(segment["pages"]) == {"0"}
    assert segment["pages"]["0"] > 15_000
    assert any("were on other nodes; dropped and read again" in line for line in found["log"])
    (worker,) = found["workers"]
    assert set(worker["weights_in_numa_maps"]) == {"0"}
    assert found["verify"]["status"] == 0


def test_a_cpuset_of_one_node_makes_one_unit_bound_to_it(facts: dict[str, Any]) -> None:
    check_bound(facts["cpuset"], {"node1": "2-3"}, {"node1": 1})


def test_a_memory_limit_is_refused_before_anything_is_loaded(facts: dict[str, Any]) -> None:
    found = facts["memory_limit"]
    assert found["status"] == 1
    assert {refusal["subject"] for refusal in found["plan"]["refusals"]} == {"cgroup memory limit"}


def test_a_model_that_fits_only_once_is_spread_evenly(facts: dict[str, Any]) -> None:
    found = facts["interleave"]
    assert found["policy"] == "interleave"
    assert "fit once over all nodes, but not on each" in found["reason"]
    (segment,) = found["segments"]
    assert segment["verdict"] == "bound", segment["explanation"]
    half = sum(segment["pages"].values()) / 2
    assert half > 9000
    for node in "01":
        assert abs(segment["pages"][node] - half) < 0.01 * 2 * half
    assert [worker["answer"]["tokens"] for worker in found["workers"]] == [1, 1]
    for worker, node in zip(found["workers"], "01", strict=True):
        assert worker["kv_nodes"] == [int(node)]
        assert set(worker["kv_pages"]) == {node}
        check_threads(worker["thread_cpus"], CPUS[f"node{node}"])
    assert found["verify"]["status"] == 0


def test_a_node_that_fills_up_while_loading_ends_in_a_refusal_and_nothing_serves(
    facts: dict[str, Any],
) -> None:
    found = facts["node_filled_while_loading"]
    assert "error" not in found, found["error"]
    assert found["status"] == 3
    log = "\n".join(found["log"])
    assert "the loader ended without a segment: killed by SIGKILL (out of memory" in log
    assert "ready: " not in log
