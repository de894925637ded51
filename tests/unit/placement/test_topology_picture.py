import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from fake_host import FakeHost, FakeNode, two_nodes_smt

from placement.plan import PlanRequest, make_plan
from placement.topology_picture import topology_html, topology_svg

ROOT = Path(__file__).parents[3]
SVG = "{http://www.w3.org/2000/svg}"


def draw(host: FakeHost, affinity: str | None = None) -> ET.Element:
    topology = host.read(affinity)
    plan = make_plan(PlanRequest(weights_bytes=0, kv_block_bytes=0, min_kv_blocks=0), topology)
    return ET.fromstring(topology_svg(topology, plan))


def texts(picture: ET.Element) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SVG}text")]


def test_every_node_cpu_and_device_is_shown(tmp_path):
    host = two_nodes_smt(tmp_path)
    host.add_pci("0000:41:00.0", 0x030200, 0x10DE, 0)
    shown = texts(draw(host))
    assert {"node 0", "node 1", "unit node0", "unit node1", "GPU"} <= set(shown)
    assert {str(cpu) for cpu in range(16)} <= set(shown)
    assert any("0000:41:00.0" in text for text in shown)
    assert "worker 1: CPUs 4-7,12-15, 3 threads, memory of node 1" in shown


def test_cpus_of_different_workers_differ_in_colour_and_barred_ones_are_dashed(tmp_path):
    picture = draw(two_nodes_smt(tmp_path), affinity="0-5,8-13")
    cells = [box for box in picture.iter(f"{SVG}rect") if box.get("width") == box.get("height") == "22"]
    assert len(cells) == 16
    assert sum(cell.get("stroke-dasharray") is not None for cell in cells) == 4
    assert len({cell.get("fill") for cell in cells}) == 3


def test_nothing_lies_outside_the_picture(tmp_path):
    nodes = {node: FakeNode(f"{node * 32}-{node * 32 + 31}") for node in range(8)}
    nodes[8] = FakeNode("", 1024)
    nodes[9] = FakeNode("256-257", 0)
    picture = draw(FakeHost(tmp_path, nodes).build())
    width, height = float(picture.get("width")), float(picture.get("height"))
    boxes = [box for box in picture.iter(f"{SVG}rect") if box.get("x")]
    assert max(float(box.get("x")) + float(box.get("width")) for box in boxes) <= width
    assert max(float(box.get("y")) + float(box.get("height")) for box in boxes) <= height
    assert {"no CPUs", "no memory"} <= set(texts(picture))


def test_text_from_the_host_is_escaped(tmp_path):
    topology = two_nodes_smt(tmp_path).read()
    plan = make_plan(PlanRequest(0, 0, 0, nodes="<7>"), topology)
    assert "&lt;7&gt;" in topology_svg(topology, plan)
    assert "<pre>a &lt; b</pre>" in topology_html(topology, plan, ["a < b"])


@pytest.mark.parametrize(("flag", "start"), [("--svg", "<svg "), ("--html", "<!doctype html>")])
def test_the_script_writes_the_file(tmp_path, flag, start):
    path = tmp_path / "host"
    script = [sys.executable, "-I", str(ROOT / "scripts/numa_topology.py")]
    subprocess.run([*script, flag, path], check=True)
    assert path.read_text().startswith(start)
    refused = subprocess.run(
        [*script, flag, tmp_path / "no" / "host"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 1
    assert "No such file" in refused.stderr
