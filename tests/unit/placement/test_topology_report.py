import ast
import errno
import re
import subprocess
import sys
from pathlib import Path

from fake_host import FakeHost, FakeNode, two_nodes_smt

from placement import numa
from placement.permissions import probe_permissions
from placement.plan import PlanRequest, make_plan
from placement.topology_report import SCHEMA_VERSION, topology_json, topology_lines

SCHEMA = Path(__file__).resolve().parents[3] / "docs/topology-schema.md"


def report(topology, render):
    with numa.refusing(mbind=errno.EPERM):
        permissions = probe_permissions()
    plan = make_plan(PlanRequest(weights_bytes=0, kv_block_bytes=0, min_kv_blocks=0), topology)
    return render(topology, permissions, plan)


def keys_of(value):
    """Every key of nested objects, except node ids."""
    if isinstance(value, dict):
        own = {key for key in value if not key.isdigit()}
        return own.union(*map(keys_of, value.values()))
    if isinstance(value, list):
        return set().union(*map(keys_of, value))
    return set()


def test_every_key_is_documented(tmp_path):
    host = two_nodes_smt(tmp_path)
    host.add_pci("0000:81:00.0", 0x030200, 0x10DE, node=1)
    host.add_cgroup_v2("/", {"/": {"memory.max": "1073741824", "memory.current": "5"}})
    found = report(host.read(), topology_json)
    documented = set(re.findall(r"[a-z_]+", SCHEMA.read_text()))
    assert keys_of(found) - documented == set()
    assert found["schema_version"] == SCHEMA_VERSION
    assert f"| `schema_version` | int | {SCHEMA_VERSION} |" in SCHEMA.read_text()


def test_text_says_what_an_operator_asks(tmp_path):
    nodes = {
        0: FakeNode("0-1", memory=4096, distances=(10, 12, 30)),
        2: FakeNode("2-3", memory=0, distances=(12, 10, 31)),
        5: FakeNode("", memory=2048, distances=(30, 31, 10)),
    }
    host = FakeHost(tmp_path, nodes, offline="9").build()
    host.add_pci("0000:81:00.0", 0x030200, 0x10DE, node=5)
    host.add_pci("0000:01:00.0", 0x020000, 0x1AF4, node=-1, interface="net/eth0")
    text = "\n".join(report(host.read(affinity="0,2"), topology_lines))
    for line in (
        "3 nodes, 4 CPUs on 4 cores (1 more offline), 6 GiB",
        "cpus        0-1 (2 on 2 cores, usable here: 0)",
        "memory      4 GiB, 4 GiB free",
        "huge pages  4 of 2 MiB, 3 free",
        "  cpus        none",
        "  memory      none",
        "  gpu         0000:81:00.0, NVIDIA 2330, no driver",
        "devices whose node is unknown\n  0000:01:00.0, virtio 2330, no driver, eth0",
        "  node   0   2   5\n    0:  10  12  30\n    2:  12  10  31\n    5:  30  31  10",
        "numa_balancing     3 (moves unbound pages to the node that uses them, demotes cold pages to slower memory)",
        "shared memory      huge pages never",
        "mbind              refused (EPERM)",
        "note     node 2 has no memory",
    ):
        assert line in text


def test_what_the_script_imports_is_written_for_python_3_9():
    code = (
        "import sys, placement.topology_report;"
        "print(*(module.__file__ for name, module in sys.modules.items() if name[:9] == 'placement'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for path in map(Path, done.stdout.split()):
        tree = ast.parse(path.read_text(), feature_version=(3, 9))
        keywords = {
            keyword.arg
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("dataclass", "zip")
            for keyword in node.keywords
        }
        assert not keywords & {"slots", "kw_only", "strict"}, path
        body = [node for node in tree.body if not isinstance(node, ast.Expr)]
        assert not body or ast.unparse(body[0]) == "from __future__ import annotations", path
