import errno
from dataclasses import replace

import pytest
from fake_host import GIB, MIB, FakeHost, FakeNode, pairs, plain_nodes, two_nodes_smt

from placement import numa
from placement.permissions import probe_permissions
from placement.plan import PlanRequest, Policy, make_plan
from placement.plan_report import plan_json, plan_lines

SMALL = PlanRequest(weights_bytes=256 * MIB, kv_block_bytes=MIB, min_kv_blocks=16)


def plan(topology, request=SMALL, **changes):
    return make_plan(replace(request, **changes), topology)


def workers_of(planned):
    return [worker for unit in planned.units for worker in unit.workers]


def assert_disjoint(planned):
    cpus = [cpu for worker in workers_of(planned) for cpu in worker.cpus]
    assert len(cpus) == len(set(cpus))
    assert [worker.index for worker in workers_of(planned)] == list(range(len(workers_of(planned))))


def only_refusal(planned):
    assert planned.units == ()
    assert len(planned.refusals) == 1
    return planned.refusals[0]


def test_two_nodes_get_a_copy_and_a_worker_each(tmp_path):
    planned = plan(two_nodes_smt(tmp_path).read())
    assert planned.policy is Policy.REPLICATE
    assert [(unit.name, unit.memory_nodes) for unit in planned.units] == [("node0", (0,)), ("node1", (1,))]
    assert [worker.cpus for worker in workers_of(planned)] == [
        (0, 1, 2, 3, 8, 9, 10, 11),
        (4, 5, 6, 7, 12, 13, 14, 15),
    ]
    assert [worker.compute_threads for worker in workers_of(planned)] == [3, 3]
    assert "2 nodes" in planned.policy_reason
    assert_disjoint(planned)


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (7, 1), (8, 1), (16, 2), (24, 3), (64, 4)])
def test_default_workers_have_eight_cores_or_more(tmp_path, cores, workers):
    planned = plan(plain_nodes(tmp_path, cores, count=1).read())
    assert len(workers_of(planned)) == workers


@pytest.mark.parametrize("each", [1, 2, 3, 4, 5, 8])
def test_workers_fewer_more_and_not_a_multiple_of_the_cores(tmp_path, each):
    planned = plan(two_nodes_smt(tmp_path).read(), workers_per_node=each)
    assert [len(unit.workers) for unit in planned.units] == [each, each]
    assert_disjoint(planned)
    for unit in planned.units:
        assert all(set(worker.cpus) <= set(unit.cpus) for worker in unit.workers)


def test_more_workers_than_cpus_share_and_say_so(tmp_path):
    planned = plan(plain_nodes(tmp_path, 2, count=1).read(), workers_per_node=3)
    assert [worker.compute_threads for worker in workers_of(planned)] == [1, 1, 1]
    assert any("3 workers share 2 CPUs" in note for note in planned.notes)


@pytest.mark.parametrize(
    ("total", "per_unit"), [(1, [1]), (2, [1, 1]), (3, [2, 1]), (4, [2, 2]), (5, [3, 2])]
)
def test_workers_in_all_are_spread_over_nodes(tmp_path, total, per_unit):
    planned = plan(two_nodes_smt(tmp_path).read(), workers=total)
    assert [len(unit.workers) for unit in planned.units] == per_unit
    assert_disjoint(planned)


def test_one_worker_on_two_nodes_names_the_idle_node(tmp_path):
    assert any("nodes 1 stay" in note for note in plan(two_nodes_smt(tmp_path).read(), workers=1).notes)


@pytest.mark.parametrize("threads", [1, 2, 17, 64])
def test_threads_as_asked(tmp_path, threads):
    planned = plan(plain_nodes(tmp_path, 32, count=1).read(), threads_per_worker=threads, workers_per_node=1)
    assert workers_of(planned)[0].compute_threads == threads
    assert any("--threads-per-worker" in note for note in planned.notes) == (threads > 32)


def test_allowed_set_that_leaves_one_cpu_on_node_1(tmp_path):
    planned = plan(two_nodes_smt(tmp_path).read(affinity="0-3,8-11,5"))
    assert [unit.cpus for unit in planned.units] == [(0, 1, 2, 3, 8, 9, 10, 11), (5,)]


def test_cpuset_to_node_1_gives_one_unit_there(tmp_path):
    planned = plan(two_nodes_smt(tmp_path, mems_allowed="1").read(affinity="4-7"))
    assert [(unit.name, unit.memory_nodes) for unit in planned.units] == [("node1", (1,))]


def test_cpuset_on_an_smt_host_counts_physical_cores(tmp_path):
    nodes = {0: FakeNode("0-59,120-179", 65536), 1: FakeNode("60-119,180-239", 65536)}
    host = FakeHost(tmp_path, nodes, siblings=pairs(range(120), 120)).build()
    planned = plan(host.read(affinity="0-29,120-149"), workers_per_node=1)
    (worker,) = workers_of(planned)
    assert worker.cpus == (*range(30), *range(120, 150))
    assert worker.compute_threads == 29


def test_memory_only_node_houses_nobody_and_holds_nothing_unasked(tmp_path):
    host = FakeHost(tmp_path, {0: FakeNode("0-1"), 1: FakeNode("2-3"), 2: FakeNode("")}).build()
    planned = plan(host.read())
    assert [unit.memory_nodes for unit in planned.units] == [(0,), (1,)]


def test_memory_only_node_is_used_through_membind(tmp_path):
    nodes = {
        0: FakeNode("0-1", distances=(10, 20, 30)),
        1: FakeNode("2-3", distances=(20, 10, 14)),
        2: FakeNode("", distances=(30, 14, 10)),
    }
    topology = FakeHost(tmp_path, nodes).build().read()
    assert [unit.memory_nodes for unit in plan(topology, membind="all").units] == [(0,), (1, 2)]
    (unit,) = plan(topology, membind="2").units
    assert (unit.name, unit.nodes, unit.memory_nodes) == ("node0-1", (0, 1), (2,))
    assert len(unit.workers) == 2


def test_memory_of_a_memory_less_node_goes_to_the_nearest(tmp_path):
    nodes = {
        0: FakeNode("0-1", distances=(10, 30, 20)),
        1: FakeNode("2-3", distances=(30, 10, 12)),
        2: FakeNode("4-5", memory=0, distances=(20, 12, 10)),
    }
    planned = plan(FakeHost(tmp_path, nodes).build().read())
    assert [(unit.name, unit.nodes, unit.memory_nodes) for unit in planned.units] == [
        ("node0", (0,), (0,)),
        ("node1-2", (1, 2), (1,)),
    ]
    assert any("node 2 has no memory" in note for note in planned.notes)
    assert_disjoint(planned)


def test_memory_only_node_0_serves_a_memory_less_node_2(tmp_path):
    host = FakeHost(tmp_path, {0: FakeNode(""), 2: FakeNode("0-7", memory=0)}).build()
    (unit,) = plan(host.read()).units
    assert (unit.nodes, unit.memory_nodes, unit.cpus) == ((2,), (0,), tuple(range(8)))


@pytest.mark.parametrize("ids", [(0, 2), (0, 2, 5), (64,)])
def test_sparse_node_ids(tmp_path, ids):
    nodes = {node: FakeNode(f"{position * 2}-{position * 2 + 1}") for position, node in enumerate(ids)}
    planned = plan(FakeHost(tmp_path, nodes).build().read())
    assert [unit.memory_nodes for unit in planned.units] == [(node,) for node in ids]


def test_sub_numa_clusters_each_bind_their_own_memory(tmp_path):
    planned = plan(plain_nodes(tmp_path, 32, count=6).read(), physcpubind="0-95")
    assert [unit.memory_nodes for unit in planned.units] == [(0,), (1,), (2,)]


def test_eight_nodes_and_128_cpus(tmp_path):
    planned = plan(plain_nodes(tmp_path, 16, count=8).read())
    assert len(planned.units) == 8
    assert len(workers_of(planned)) == 16
    assert_disjoint(planned)


def test_single_aarch64_node_without_smt_files_takes_two_workers(tmp_path):
    topology = FakeHost(tmp_path, {0: FakeNode("0-7")}, smt_files=False).build().read()
    planned = plan(topology, workers_per_node=2)
    assert [worker.cpus for worker in workers_of(planned)] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_no_node_directory_still_plans(tmp_path):
    host = FakeHost(tmp_path, {0: FakeNode("0-3")}, node_directory=False).build()
    (unit,) = plan(host.read()).units
    assert (unit.name, unit.cpus) == ("node0", (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("changes", "units", "note"),
    [
        ({"nodes": "1"}, [(1,)], None),
        ({"nodes": "!0"}, [(1,)], None),
        ({"nodes": "+0"}, [(0,)], None),
        ({"cpunodebind": "0"}, [(0,)], None),
        ({"nodes": "all"}, [(0,), (1,)], None),
        ({"nodes": "0-2"}, [(0,), (1,)], "--nodes: 2 left out"),
        ({"nodes": "0-1", "cpunodebind": "1"}, [(1,)], None),
        ({"physcpubind": "0-1"}, [(0,)], None),
        ({"physcpubind": "1,2"}, [(0,), (1,)], None),
        ({"nodes": "0,1", "physcpubind": "2"}, [(1,)], "--nodes: 0 left out"),
    ],
)
def test_node_and_cpu_flags(tmp_path, changes, units, note):
    host = FakeHost(tmp_path, {0: FakeNode("0-1"), 1: FakeNode("2-3"), 2: FakeNode("")}).build()
    planned = plan(host.read(), **changes)
    assert planned.refusals == ()
    assert [unit.nodes for unit in planned.units] == units
    assert note is None or any(note in item for item in planned.notes)


@pytest.mark.parametrize(
    ("changes", "subject", "words"),
    [
        ({"nodes": "7"}, "--nodes", "node 7 does not exist; this host has 0-2"),
        ({"nodes": "0,7-8"}, "--nodes", "nodes 7-8 do not exist"),
        ({"nodes": "2"}, "--nodes", "no CPU there to house a worker"),
        ({"nodes": "x"}, "--nodes", "'x'"),
        ({"nodes": "!all"}, "--nodes", "leaves no node"),
        ({"nodes": "0", "cpunodebind": "1"}, "--cpunodebind", "nothing in common with --nodes"),
        ({"cpunodebind": "9"}, "--cpunodebind", "does not exist"),
        ({"membind": "9"}, "--membind", "does not exist"),
        ({"membind": "3-1"}, "--membind", "backwards"),
        ({"interleave": "9"}, "--interleave", "does not exist"),
        ({"interleave": "0", "membind": "0"}, "--interleave", "--membind"),
        ({"interleave": "0", "placement": "replicate"}, "--interleave", "--placement replicate"),
        ({"placement": "scatter"}, "--placement", "'scatter'"),
        ({"physcpubind": "64"}, "--physcpubind", "CPU 64 does not exist"),
        ({"physcpubind": "0", "nodes": "1"}, "--nodes", "--physcpubind 0"),
        ({"workers_per_node": 0}, "--workers-per-node", "at least 1"),
        ({"workers": -1}, "--workers", "at least 1"),
        ({"workers": 2, "workers_per_node": 2}, "--workers", "--workers-per-node"),
        ({"threads_per_worker": 0}, "--threads-per-worker", "at least 1"),
        ({"kv_cache_bytes": MIB - 1}, "--kv-cache-memory", "one KV block"),
        ({"kv_cache_bytes": 0}, "--kv-cache-memory", "one KV block"),
    ],
)
def test_refusals_name_the_flag(tmp_path, changes, subject, words):
    host = FakeHost(tmp_path, {0: FakeNode("0-1"), 1: FakeNode("2-3"), 2: FakeNode("")}).build()
    refusal = only_refusal(plan(host.read(), **changes))
    assert refusal.subject == subject
    assert words in refusal.reason


def test_offline_and_forbidden_cpus(tmp_path):
    topology = two_nodes_smt(tmp_path, offline="3").read(affinity="0-2,4")
    assert "offline" in only_refusal(plan(topology, physcpubind="3")).reason
    assert "may be used" in only_refusal(plan(topology, physcpubind="5")).reason
    planned = plan(topology, physcpubind="0,5")
    assert planned.units[0].cpus == (0,)
    assert any("--physcpubind: 5 left out" in note for note in planned.notes)


def test_only_the_refused_node_of_a_list_is_dropped(tmp_path):
    topology = two_nodes_smt(tmp_path, mems_allowed="0").read()
    planned = plan(topology, membind="0,1")
    assert [unit.memory_nodes for unit in planned.units] == [(0,)]
    assert any("1 outside Mems_allowed" in note for note in planned.notes)
    assert "outside Mems_allowed" in only_refusal(plan(topology, membind="1")).reason


def test_a_node_outside_mems_allowed_sends_its_memory_to_an_allowed_one(tmp_path):
    planned = plan(two_nodes_smt(tmp_path, mems_allowed="0").read())
    assert [(unit.nodes, unit.memory_nodes) for unit in planned.units] == [((0, 1), (0,))]
    assert any("node 1 is outside Mems_allowed" in note for note in planned.notes)


def test_no_cpu_left_is_refused(tmp_path):
    assert only_refusal(plan(two_nodes_smt(tmp_path).read(affinity=""))).subject == "cpuset"


def test_auto_interleaves_what_fits_only_once(tmp_path):
    topology = plain_nodes(tmp_path, 2, memory=4096).read()
    planned = plan(topology, weights_bytes=5 * GIB)
    assert planned.policy is Policy.INTERLEAVE
    assert "not on each" in planned.policy_reason
    assert "memory of node 0" in planned.policy_reason
    (unit,) = planned.units
    assert (unit.name, unit.nodes, unit.memory_nodes) == ("node0-1", (0, 1), (0, 1))
    assert [worker.memory_nodes for worker in unit.workers] == [(0,), (1,)]


def test_auto_that_fits_nowhere_says_why_for_both(tmp_path):
    planned = plan(plain_nodes(tmp_path, 2, memory=4096).read(), weights_bytes=50 * GIB)
    assert {refusal.subject for refusal in planned.refusals} == {"memory of node 0", "memory of node 1"}
    assert any(refusal.reason.startswith("replicate: needs") for refusal in planned.refusals)
    assert any(refusal.reason.startswith("interleave: needs") for refusal in planned.refusals)


def test_replicate_that_was_asked_for_is_refused_not_changed(tmp_path):
    planned = plan(plain_nodes(tmp_path, 2, memory=4096).read(), weights_bytes=5 * GIB, placement="replicate")
    assert [refusal.subject for refusal in planned.refusals] == ["memory of node 0", "memory of node 1"]
    assert "5 GiB of weights" in planned.refusals[0].reason


def test_a_full_node_refuses_although_the_other_has_room(tmp_path):
    host = FakeHost(tmp_path, {0: FakeNode("0-1", 8192), 1: FakeNode("2-3", 8192, free=300)}).build()
    assert only_refusal(plan(host.read(), placement="replicate")).subject == "memory of node 1"
    assert plan(host.read(), nodes="0").refusals == ()


def test_file_cache_does_not_make_a_node_full(tmp_path):
    host = FakeHost(tmp_path, {0: FakeNode("0-1", 8192, free=100, file_cache=7000)}).build()
    assert plan(host.read()).refusals == ()


def test_kv_cache_over_what_the_node_has_names_its_flag(tmp_path):
    refusal = only_refusal(
        plan(plain_nodes(tmp_path, 2, count=1, memory=4096).read(), kv_cache_bytes=8 * GIB)
    )
    assert refusal.subject == "--kv-cache-memory"
    assert "at most" in refusal.reason


def test_kv_cache_defaults(tmp_path):
    topology = plain_nodes(tmp_path, 2, count=1, memory=65536).read()
    assert workers_of(plan(topology))[0].kv_cache_bytes == 64 * 16 * MIB
    assert workers_of(plan(topology, min_kv_blocks=1000))[0].kv_cache_bytes == 4 * GIB
    assert workers_of(plan(topology, min_kv_blocks=8000))[0].kv_cache_bytes == 8000 * MIB
    assert workers_of(plan(topology, kv_cache_bytes=100 * MIB + 5))[0].kv_cache_bytes == 100 * MIB


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_default_kv_caches_of_a_node_fit_into_it(tmp_path, workers):
    topology = plain_nodes(tmp_path, 4, count=1, memory=3072).read()
    planned = plan(topology, min_kv_blocks=64, workers_per_node=workers)
    total = sum(worker.kv_cache_bytes for worker in workers_of(planned))
    assert all(worker.kv_cache_bytes >= 64 * MIB for worker in workers_of(planned))
    assert total + planned.units[0].weights_bytes < 3072 * MIB


def test_kv_cache_below_full_context_is_allowed_with_a_note(tmp_path):
    planned = plan(plain_nodes(tmp_path, 2, count=1).read(), kv_cache_bytes=2 * MIB)
    assert workers_of(planned)[0].kv_cache_bytes == 2 * MIB
    assert any("full context length" in note for note in planned.notes)


def test_default_workers_are_fewer_where_memory_holds_no_more(tmp_path):
    topology = plain_nodes(tmp_path, 32, count=1, memory=4096).read()
    planned = plan(topology, min_kv_blocks=1200)
    assert len(workers_of(planned)) == 2
    assert any("2 workers instead of 4" in note for note in planned.notes)
    assert only_refusal(plan(topology, min_kv_blocks=1200, workers_per_node=4)).subject == "memory of node 0"


def test_cgroup_limit_below_the_weights_is_refused(tmp_path):
    host = plain_nodes(tmp_path, 2)
    host.add_cgroup_v2("/a", {"/a": {"memory.max": str(1024 * MIB), "memory.current": str(900 * MIB)}})
    planned = plan(host.read())
    assert {refusal.subject for refusal in planned.refusals} == {"cgroup memory limit"}
    assert "124 MiB left of 1 GiB" in planned.refusals[0].reason


def test_cgroup_limit_bounds_the_default_kv_cache(tmp_path):
    host = plain_nodes(tmp_path, 2, count=1, memory=65536)
    host.add_cgroup_v2("/", {"/": {"memory.max": str(2 * GIB), "memory.current": "0"}})
    (worker,) = workers_of(plan(host.read(), min_kv_blocks=64))
    assert 64 * MIB <= worker.kv_cache_bytes < GIB


def test_cgroup_cpu_quota_limits_threads(tmp_path):
    host = plain_nodes(tmp_path, 16, count=1)
    host.add_cgroup_v2("/", {"/": {"cpu.max": "400000 100000"}})
    planned = plan(host.read(), workers_per_node=2)
    assert [worker.compute_threads for worker in workers_of(planned)] == [2, 2]
    assert any("4 CPUs of time" in note for note in planned.notes)


def test_interleave_flag_spreads_over_its_nodes(tmp_path):
    host = FakeHost(tmp_path, {0: FakeNode("0-1"), 1: FakeNode("2-3"), 2: FakeNode("")}).build()
    planned = plan(host.read(), interleave="0,2", nodes="0")
    assert planned.policy is Policy.INTERLEAVE
    assert [(unit.nodes, unit.memory_nodes) for unit in planned.units] == [((0,), (0, 2))]


def test_an_even_share_must_fit_the_smaller_node(tmp_path):
    host = FakeHost(tmp_path, {0: FakeNode("0-1", 16384), 1: FakeNode("2-3", 1024)}).build()
    refusal = only_refusal(plan(host.read(), weights_bytes=4 * GIB, placement="interleave"))
    assert refusal.subject == "memory of node 1"


def test_shared_is_one_unit_over_all_nodes_and_only_when_asked_for(tmp_path):
    topology = two_nodes_smt(tmp_path).read()
    planned = plan(topology, placement="shared", shared_obstacle="")
    assert (planned.policy, planned.policy_reason) == (Policy.SHARED, "--placement shared")
    (unit,) = planned.units
    assert (unit.nodes, unit.memory_nodes) == ((0, 1), (0, 1))
    assert [worker.memory_nodes for worker in unit.workers] == [(0,), (1,)]
    assert any("one page cache for all nodes" in note for note in planned.notes)
    one = plan(topology, placement="shared", nodes="1")
    assert [unit.memory_nodes for unit in one.units] == [(1,)]
    assert not any("page cache" in note for note in one.notes)


def test_shared_is_refused_where_files_would_have_to_be_converted(tmp_path):
    topology, obstacle = two_nodes_smt(tmp_path).read(), "a.safetensors: tensor t is F8_E4M3"
    refusal = only_refusal(plan(topology, placement="shared", shared_obstacle=obstacle))
    assert refusal.subject == "--placement shared"
    assert refusal.reason == f"serves files as they are, but {obstacle}"
    assert plan(topology, shared_obstacle=obstacle).refusals == ()


def test_two_membind_nodes_fill_one_after_the_other(tmp_path):
    host = FakeHost(tmp_path, {0: FakeNode("0-1", 4096), 1: FakeNode("", 4096)}).build()
    assert plan(host.read(), weights_bytes=5 * GIB, membind="0,1").refusals == ()
    refusal = only_refusal(plan(host.read(), weights_bytes=9 * GIB, membind="0,1"))
    assert refusal.subject == "memory of nodes 0-1"


def test_refused_calls_are_notes_that_name_what_lifts_them(tmp_path):
    with numa.refusing(mbind=errno.EPERM):
        permissions = probe_permissions()
    planned = make_plan(SMALL, two_nodes_smt(tmp_path).read(), permissions)
    assert planned.refusals == ()
    assert any(note.startswith("mbind refused (EPERM") for note in planned.notes)
    assert any("first touch alone" in note for note in planned.notes)


def test_the_same_question_gets_the_same_plan(tmp_path):
    topology = two_nodes_smt(tmp_path).read()
    assert plan(topology, workers_per_node=3) == plan(topology, workers_per_node=3)


def test_report_in_words_and_json(tmp_path):
    topology = two_nodes_smt(tmp_path).read()
    planned = plan(topology)
    text = "\n".join(plan_lines(planned))
    assert "policy   replicate: 256 MiB of weights fit on each of 2 nodes" in text
    assert "unit node1: CPUs 4-7,12-15, memory on node 1, 256 MiB of weights" in text
    assert "worker 1: CPUs 4-7,12-15, 3 compute threads, KV cache 1 GiB on node 1" in text
    assert "memory   node 0: 256 MiB of weights, 1 GiB of KV cache" in text
    assert plan_json(planned)["units"][1]["workers"][0]["cpus"] == [4, 5, 6, 7, 12, 13, 14, 15]
    refused = plan(topology, nodes="5")
    assert plan_lines(refused) == ["refused  --nodes: node 5 does not exist; this host has 0-1"]
