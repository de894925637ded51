import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_host import MIB, FakeHost, FakeNode, pairs, plain_nodes, two_nodes_smt, write

from placement.topology import read_topology

SCRIPT = Path(__file__).resolve().parents[3] / "scripts/numa_topology.py"


def test_two_nodes_with_smt(tmp_path):
    topology = two_nodes_smt(tmp_path).read()
    assert [node.cpus for node in topology.nodes] == [
        (0, 1, 2, 3, 8, 9, 10, 11),
        (4, 5, 6, 7, 12, 13, 14, 15),
    ]
    assert topology.cpu(12).siblings == (4, 12)
    assert topology.cpu(12).core == 4
    assert topology.cpu(12).node == 1
    assert topology.node(0).distances == {0: 10, 1: 20}
    assert topology.node(0).memory_total == 8192 * MIB
    assert (topology.node(0).huge_pages[0].total, topology.node(0).huge_pages[0].free) == (4, 3)


def test_kernel_settings(tmp_path):
    kernel = two_nodes_smt(tmp_path).read().kernel
    assert (kernel.numa_balancing, kernel.zone_reclaim_mode) == (3, 0)
    assert (kernel.thp_enabled, kernel.thp_shmem) == ("madvise", "never")


def test_gap_in_node_ids_maps_distances_by_position(tmp_path):
    nodes = {
        0: FakeNode("0-1", distances=(10, 12, 30)),
        2: FakeNode("2-3", distances=(12, 10, 31)),
        5: FakeNode("4-5", distances=(30, 31, 10)),
    }
    topology = FakeHost(tmp_path, nodes).build().read()
    assert [node.id for node in topology.nodes] == [0, 2, 5]
    assert topology.node(2).distances == {0: 12, 2: 10, 5: 31}


def test_node_without_cpus_and_node_without_memory(tmp_path):
    topology = FakeHost(tmp_path, {0: FakeNode(""), 2: FakeNode("0-7", memory=0)}).build().read()
    assert (topology.node(0).has_cpu, topology.node(0).has_memory) == (False, True)
    assert (topology.node(2).has_cpu, topology.node(2).has_memory) == (True, False)


def test_offline_cpus_are_known_but_not_usable(tmp_path):
    topology = two_nodes_smt(tmp_path, offline="3,8-15").read()
    assert topology.usable_cpus == (0, 1, 2, 4, 5, 6, 7)
    assert not topology.cpu(3).online
    assert topology.cpu(3).node is None
    assert topology.cpu(0).siblings == (0,)
    assert topology.node(0).cpus == (0, 1, 2)


def test_no_node_directory_is_one_node_with_everything(tmp_path):
    host = FakeHost(tmp_path, {0: FakeNode("0-3", memory=1000)}, node_directory=False).build()
    topology = host.read()
    assert not topology.numa_in_kernel
    assert [(node.id, node.cpus) for node in topology.nodes] == [(0, (0, 1, 2, 3))]
    assert topology.node(0).memory_total == 1000 * MIB
    assert topology.cpu(2).node == 0
    assert topology.allowed_nodes == (0,)


def test_aarch64_without_smt_files_has_a_core_per_cpu(tmp_path):
    topology = FakeHost(tmp_path, {0: FakeNode("0-3")}, smt_files=False).build().read()
    assert [cpu.core for cpu in topology.cpus] == [0, 1, 2, 3]


def test_sub_numa_clusters(tmp_path):
    topology = plain_nodes(tmp_path, cpus_per_node=32, count=6).read()
    assert [node.cpus[0] for node in topology.nodes] == [0, 32, 64, 96, 128, 160]
    assert len(topology.usable_cpus) == 192


def test_affinity_limits_usable_cpus(tmp_path):
    assert two_nodes_smt(tmp_path).read(affinity="0,4").usable_cpus == (0, 4)


def test_file_cache_counts_as_available_but_not_as_free(tmp_path):
    host = FakeHost(tmp_path, {0: FakeNode("0", memory=1000, free=100, file_cache=700)}).build()
    node = host.read().node(0)
    assert (node.memory_free, node.memory_available) == (100 * MIB, 800 * MIB)


def test_mems_allowed_limits_nodes(tmp_path):
    assert two_nodes_smt(tmp_path, mems_allowed="1").read().allowed_nodes == (1,)


def test_cgroup_v2_limits_of_all_levels_count(tmp_path):
    host = two_nodes_smt(tmp_path)
    host.add_cgroup_v2(
        "/kube/pod/main",
        {
            "/kube/pod/main": {
                "memory.max": "max",
                "memory.high": "max",
                "cpuset.cpus.effective": "0-3",
                "cpu.max": "max 100000",
            },
            "/kube/pod": {
                "memory.max": str(1024 * MIB),
                "memory.current": str(600 * MIB),
                "memory.stat": f"anon 5\nactive_file {100 * MIB}\ninactive_file {200 * MIB}",
                "cpu.max": "250000 100000",
            },
            "/kube": {"memory.max": str(4096 * MIB), "memory.current": str(700 * MIB)},
            "/": {"cpuset.cpus.effective": "0-15"},
        },
    )
    topology = host.read()
    assert topology.cpuset_cpus == (0, 1, 2, 3)
    assert topology.usable_cpus == (0, 1, 2, 3)
    assert topology.cpu_quota == 2.5
    assert [limit.limit for limit in topology.memory_limits] == [1024 * MIB, 4096 * MIB]
    tightest = topology.tightest_memory_limit
    assert tightest.path.endswith("/kube/pod")
    assert tightest.available == (1024 - 600 + 300) * MIB


def test_cgroup_v2_outer_level_can_be_the_tightest(tmp_path):
    host = two_nodes_smt(tmp_path)
    inner = {"memory.max": str(2048 * MIB), "memory.current": "0"}
    outer = {"memory.max": str(4096 * MIB), "memory.current": str(4000 * MIB)}
    host.add_cgroup_v2("/a/b", {"/a/b": inner, "/a": outer})
    assert host.read().tightest_memory_limit.available == 96 * MIB


def test_memory_high_is_a_limit_too(tmp_path):
    host = two_nodes_smt(tmp_path)
    host.add_cgroup_v2(
        "/", {"/": {"memory.max": "max", "memory.high": str(500 * MIB), "memory.current": "0"}}
    )
    assert host.read().tightest_memory_limit.limit == 500 * MIB


def test_cgroup_v1_in_a_container_that_sees_its_own_group_as_the_root(tmp_path):
    host = two_nodes_smt(tmp_path)
    write(
        host.procfs / "self/cgroup", "5:cpuset:/docker/abc\n4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc"
    )
    write(
        host.procfs / "self/mountinfo",
        "31 30 0:1 /docker/abc /sys/fs/cgroup/cpuset ro - cgroup cgroup rw,cpuset\n"
        "32 30 0:2 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
        "33 30 0:3 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct",
    )
    groups = host.sysfs / "fs/cgroup"
    write(groups / "cpuset/cpuset.cpus", "4-7")
    write(groups / "memory/memory.limit_in_bytes", str(512 * MIB))
    write(groups / "memory/memory.usage_in_bytes", str(200 * MIB))
    write(groups / "memory/memory.stat", f"cache 1\ntotal_inactive_file {50 * MIB}\ntotal_active_file 0")
    write(groups / "cpu,cpuacct/cpu.cfs_quota_us", "150000")
    write(groups / "cpu,cpuacct/cpu.cfs_period_us", "100000")
    topology = host.read()
    assert topology.usable_cpus == (4, 5, 6, 7)
    assert topology.tightest_memory_limit.available == 362 * MIB
    assert topology.cpu_quota == 1.5


def test_cgroup_v1_without_a_limit_says_so_by_a_huge_number(tmp_path):
    host = two_nodes_smt(tmp_path)
    write(host.procfs / "self/cgroup", "4:memory:/x")
    write(host.procfs / "self/mountinfo", "32 30 0:2 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory")
    write(host.sysfs / "fs/cgroup/memory/x/memory.limit_in_bytes", "9223372036854771712")
    assert host.read().memory_limits == ()


def test_a_group_outside_the_namespace_falls_back_to_what_is_mounted(tmp_path):
    host = two_nodes_smt(tmp_path)
    host.add_cgroup_v2("/../../other", {"/": {"memory.max": str(100 * MIB), "memory.current": "0"}})
    assert host.read().tightest_memory_limit.limit == 100 * MIB


def test_gpus_and_nics_hang_on_nodes(tmp_path):
    host = two_nodes_smt(tmp_path)
    host.add_pci("0000:81:00.0", 0x030200, 0x10DE, node=1)
    host.add_pci("0000:82:00.0", 0x068000, 0x10DE, node=1)
    host.add_pci("0000:03:00.0", 0x020000, 0x15B3, node=0, interface="net/ens3")
    host.add_pci("0000:04:00.0", 0x020000, 0x1AF4, node=-1, interface="virtio2/net/eth0")
    topology = host.read()
    assert [(gpu.address, gpu.node, gpu.vendor) for gpu in topology.gpus] == [("0000:81:00.0", 1, "NVIDIA")]
    assert [(nic.node, nic.names) for nic in topology.nics] == [(0, ("ens3",)), (None, ("eth0",))]


def test_an_empty_tree_does_not_fail(tmp_path):
    topology = read_topology(tmp_path / "sys", tmp_path / "proc", affinity=())
    assert topology.usable_cpus == ()
    assert topology.memory_limits == ()


def test_siblings_of_a_large_host(tmp_path):
    nodes = {0: FakeNode("0-59,120-179"), 1: FakeNode("60-119,180-239")}
    host = FakeHost(tmp_path, nodes, siblings=pairs(range(120), 120)).build()
    topology = host.read(affinity="0-29,120-149")
    assert len(topology.usable_cpus) == 60
    assert len({topology.cpu(cpu).core for cpu in topology.usable_cpus}) == 30


def parse_numactl(text):
    """`numactl -H` as {node: (cpus, MiB)} and {node: distances}."""
    cpus = {
        int(node): tuple(map(int, ids.split())) for node, ids in re.findall(r"node (\d+) cpus:(.*)", text)
    }
    sizes = {int(node): int(size) for node, size in re.findall(r"node (\d+) size: (\d+) MB", text)}
    table = text.partition("node distances:")[2]
    rows = {
        int(node): tuple(map(int, row.split())) for node, row in re.findall(r"^\s*(\d+):(.*)$", table, re.M)
    }
    return cpus, sizes, rows


@pytest.mark.skipif(
    shutil.which("numactl") is None, reason="numactl is not installed: no oracle to compare with"
)
def test_agrees_with_numactl_on_this_host():
    text = subprocess.run(["numactl", "-H"], capture_output=True, text=True, check=True).stdout
    cpus, sizes, rows = parse_numactl(text)
    topology = read_topology()
    assert {node.id: node.cpus for node in topology.nodes} == cpus
    assert {node.id: node.memory_total // MIB for node in topology.nodes} == sizes
    assert {node.id: tuple(node.distances.values()) for node in topology.nodes} == rows


def test_the_script_prints_text_and_json():
    def output(*flags):
        done = subprocess.run(
            [sys.executable, "-I", str(SCRIPT), *flags], capture_output=True, text=True, check=True
        )
        return done.stdout

    text = output()
    for heading in ("node 0", "distances", "limits of this process", "kernel settings", "mbind", "unit node"):
        assert heading in text
    report = json.loads(output("--json"))
    assert report["limits"]["affinity"] == sorted(os.sched_getaffinity(0))
    assert [call["call"] for call in report["permissions"]][:2] == ["sched_setaffinity", "set_mempolicy"]
    assert report["plan"]["units"]
