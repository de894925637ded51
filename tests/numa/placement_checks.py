"""What must hold for a server whose facts a guest brought back. JSON has turned node numbers into strings."""

from __future__ import annotations

from typing import Any

from placement.cpulist import parse_kernel_list


def check_host(facts: dict[str, Any]) -> None:
    """Our reading of the host is numactl's."""
    assert facts["status"] == 0
    nodes = facts["topology"]["nodes"]
    assert {str(node["id"]) for node in nodes} == set(facts["numactl"])
    for node in nodes:
        seen = facts["numactl"][str(node["id"])]
        assert node["cpus"] == seen["cpus"]
        assert node["memory"]["total_bytes"] >> 20 == seen["mib"]
        assert list(node["distances"].values()) == facts["distances"][str(node["id"])]


def check_bound(
    facts: dict[str, Any], cpus_of_unit: dict[str, str], nodes_of_unit: dict[str, int], membind: bool = False
) -> None:
    """Each unit's weights and caches are wholly on its one node, by our count and by the kernel's own file.

    `cpus_of_unit` are the CPU lists that the threads of its workers may run on at most. With `membind` the kernel's file
    shows the process's policy for all memory that has none of its own, so a cache cannot be told by its policy.
    """
    assert "error" not in facts, facts["error"]
    assert {segment["unit"] for segment in facts["segments"]} == set(nodes_of_unit)
    for segment in facts["segments"]:
        node = nodes_of_unit[segment["unit"]]
        assert segment["verdict"] == "bound", segment["explanation"]
        assert set(segment["pages"]) == {str(node)}
        assert segment["pages"][str(node)] > 15_000
    for worker in facts["workers"]:
        node = nodes_of_unit[worker["unit"]]
        assert set(worker["weights_in_numa_maps"]) == {str(node)}
        assert set(worker["kv_pages"]) == {str(node)}
        if not membind:
            assert worker["bound_anonymous_in_numa_maps"] == worker["kv_pages"]
        assert worker["kv_verdict"] == "bound", worker["kv_explanation"]
    check_serving(facts, cpus_of_unit, nodes_of_unit)
    assert facts["verify"]["status"] == 0
    assert facts["verify"]["sound"]
    assert len(facts["verify"]["checks"]) == len(facts["segments"]) + len(facts["workers"])


def check_serving(facts: dict[str, Any], cpus_of_unit: dict[str, str], nodes_of_unit: dict[str, int]) -> None:
    """Every worker answered, from the node it should be on, and none of its threads may leave its unit's CPUs."""
    assert facts["workers"]
    for worker in facts["workers"]:
        assert worker["answer"] == {"tokens": 1, "nodes": [nodes_of_unit[worker["unit"]]]}
        check_threads(worker["thread_cpus"], cpus_of_unit[worker["unit"]])


def check_threads(cpus_of_threads: list[str], cpus: str) -> None:
    """Some thread may run on all of the unit's CPUs, and none elsewhere: those of the kernels keep to one each."""
    assert cpus in cpus_of_threads
    allowed = set(parse_kernel_list(cpus))
    for each in cpus_of_threads:
        assert set(parse_kernel_list(each)) <= allowed, each
