"""The host as a picture: a card per node with its cores, memory and devices, coloured by the worker that gets them.

SVG 1.1 (https://www.w3.org/TR/SVG11/) and an HTML page around it, by the standard library alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from placement.cpulist import format_list
from placement.pci import PciDevice
from placement.plan import Plan
from placement.sizes import format_bytes
from placement.topology import Cpu, Node, Topology

_WORKER_COLOURS = (
    "#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#9c755f", "#d4a72c",
)  # fmt: skip
_INK, _MUTED, _LINE, _PAPER, _CARD = "#1f2933", "#66727f", "#cfd6dd", "#f4f6f8", "#ffffff"
_IDLE, _BARRED = "#e3e8ed", "#ffffff"
_USED, _FREE = "#8795a3", "#bfe3c8"

_MARGIN, _GAP, _PADDING = 24, 20, 16
_CPU, _CPU_GAP, _CORE_GAP = 22, 2, 6
_CARD_WIDTH, _LINE_HEIGHT = 380, 18
_MOST_CARDS_IN_A_ROW = 4
_CELL = 34


@dataclass
class _Canvas:
    """SVG elements in drawing order."""

    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, fill: str, **style: object) -> None:
        extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{extra}/>'
        )

    def text(self, x: float, y: float, text: str, **style: object) -> None:
        extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
        self.parts.append(f'<text x="{x:g}" y="{y:g}"{extra}>{escape(text)}</text>')


def topology_svg(topology: Topology, plan: Plan) -> str:
    """The picture. `plan` gives the colours: which worker gets which CPUs."""
    worker_of = {cpu: worker.index for unit in plan.units for worker in unit.workers for cpu in worker.cpus}
    columns = max(1, min(_MOST_CARDS_IN_A_ROW, len(topology.nodes)))
    width = max(2 * _MARGIN + columns * (_CARD_WIDTH + _GAP) - _GAP, 2 * _MARGIN + 640)
    canvas = _Canvas()
    canvas.text(_MARGIN, 42, _headline(topology), font_size=20, font_weight=600)
    canvas.text(_MARGIN, 64, _subtitle(topology, plan), fill=_MUTED)
    y = 84.0
    for first in range(0, len(topology.nodes), columns):
        row = topology.nodes[first : first + columns]
        height = max(_card_height(node, topology) for node in row)
        for position, node in enumerate(row):
            x = _MARGIN + position * (_CARD_WIDTH + _GAP)
            _draw_card(canvas, x, y, height, node, topology, plan, worker_of)
        y += height + _GAP
    bottom = _draw_distances(canvas, _MARGIN, y, topology)
    legend_x = _MARGIN + max(260, (len(topology.nodes) + 2) * _CELL + 20)
    bottom = max(bottom, _draw_legend(canvas, legend_x, y, plan))
    total = bottom + _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {total:g}" width="{width:g}" '
        f'height="{total:g}" font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif" '
        f'font-size="13" fill="{_INK}" role="img">\n<title>{escape(_headline(topology))}</title>\n'
        f'<rect width="100%" height="100%" fill="{_PAPER}"/>\n' + "\n".join(canvas.parts) + "\n</svg>\n"
    )


def topology_html(topology: Topology, plan: Plan, report: Iterable[str]) -> str:
    """A page that stands alone: the picture, and the report in words below it."""
    words = escape("\n".join(report))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(_headline(topology))}</title>\n"
        f"<style>body{{margin:0;background:{_PAPER};color:{_INK};font-family:system-ui,sans-serif}}"
        "svg{max-width:100%;height:auto}pre{margin:24px;line-height:1.45;white-space:pre-wrap}</style></head>\n"
        f"<body>\n{topology_svg(topology, plan)}<pre>{words}</pre>\n</body></html>\n"
    )


def _headline(topology: Topology) -> str:
    online = sum(cpu.online for cpu in topology.cpus)
    memory = format_bytes(sum(node.memory_total for node in topology.nodes))
    return f"{_count(len(topology.nodes), 'NUMA node')}, {_count(online, 'CPU')}, {memory}"


def _subtitle(topology: Topology, plan: Plan) -> str:
    workers = sum(len(unit.workers) for unit in plan.units)
    usable = f"usable here: CPUs {format_list(topology.usable_cpus) or 'none'}"
    memory = f"memory of nodes {format_list(topology.allowed_nodes) or 'none'}"
    served = f"{_count(len(plan.units), 'unit')} with {_count(workers, 'worker')}"
    return f"{usable}, {memory}; a model that fits every node gets {served}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _cores(node: Node, topology: Topology) -> list[list[Cpu]]:
    """The node's CPUs by physical core."""
    cores: dict[int, list[Cpu]] = {}
    for cpu in node.cpus:
        known = topology.cpu(cpu)
        cores.setdefault(known.core, []).append(known)
    return list(cores.values())


def _core_width(threads: int) -> int:
    return threads * (_CPU + _CPU_GAP) - _CPU_GAP + _CORE_GAP


def _cores_in_a_row(cores: Sequence[Sequence[Cpu]]) -> int:
    widest = max((len(core) for core in cores), default=1)
    return max(1, (_CARD_WIDTH - 2 * _PADDING + _CORE_GAP) // _core_width(widest))


def _devices(node: Node, topology: Topology) -> list[tuple[str, PciDevice]]:
    kinds = (("GPU", topology.gpus), ("NIC", topology.nics))
    return [(kind, device) for kind, devices in kinds for device in devices if device.node == node.id]


def _card_height(node: Node, topology: Topology) -> int:
    cores = _cores(node, topology)
    rows = -(-len(cores) // _cores_in_a_row(cores)) if cores else 0
    grid = rows * (_CPU + _CORE_GAP) if rows else _LINE_HEIGHT
    pools = sum(pool.total > 0 for pool in node.huge_pages)
    lines = pools + len(_devices(node, topology))
    return 46 + grid + 14 + 20 + 8 + _LINE_HEIGHT + lines * _LINE_HEIGHT + _PADDING


def _draw_card(
    canvas: _Canvas,
    x: float,
    y: float,
    height: float,
    node: Node,
    topology: Topology,
    plan: Plan,
    worker_of: dict[int, int],
) -> None:
    canvas.box(x, y, _CARD_WIDTH, height, _CARD, rx=10, stroke=_LINE)
    canvas.text(x + _PADDING, y + 28, f"node {node.id}", font_size=16, font_weight=600)
    units = [unit.name for unit in plan.units if node.id in unit.nodes or node.id in unit.memory_nodes]
    role = f"unit {', '.join(units)}" if units else "not used"
    canvas.text(x + _CARD_WIDTH - _PADDING, y + 28, role, fill=_MUTED, text_anchor="end")
    top = _draw_cores(canvas, x + _PADDING, y + 46, node, topology, worker_of)
    top = _draw_memory(canvas, x + _PADDING, top + 14, node, topology)
    for pool in node.huge_pages:
        if pool.total:
            size = format_bytes(pool.size)
            canvas.text(x + _PADDING, top + 13, f"huge pages of {size}: {pool.free} of {pool.total} free")
            top += _LINE_HEIGHT
    for kind, device in _devices(node, topology):
        named = ", ".join((f"{device.vendor} {device.device_id:04x}", *device.names))
        canvas.text(x + _PADDING, top + 13, kind, font_weight=600)
        canvas.text(x + _PADDING + 36, top + 13, f"{named} at {device.address}")
        top += _LINE_HEIGHT


def _draw_cores(
    canvas: _Canvas, x: float, y: float, node: Node, topology: Topology, worker_of: dict[int, int]
) -> float:
    """A frame per physical core with a square per thread; returns where the grid ends."""
    cores = _cores(node, topology)
    if not cores:
        canvas.text(x, y + 13, "no CPUs", fill=_MUTED)
        return y + _LINE_HEIGHT
    usable = set(topology.usable_cpus)
    in_a_row = _cores_in_a_row(cores)
    width = _core_width(max(len(core) for core in cores))
    for number, core in enumerate(cores):
        left = x + number % in_a_row * width
        top = y + number // in_a_row * (_CPU + _CORE_GAP)
        frame = len(core) * (_CPU + _CPU_GAP) - _CPU_GAP + 4
        canvas.box(left - 2, top - 2, frame, _CPU + 4, "none", rx=5, stroke=_LINE)
        for thread, cpu in enumerate(core):
            fill, ink = _IDLE, _INK
            style: dict[str, object] = {}
            if cpu.id in worker_of:
                fill, ink = _WORKER_COLOURS[worker_of[cpu.id] % len(_WORKER_COLOURS)], "#ffffff"
            elif cpu.id not in usable:
                fill, ink = _BARRED, _MUTED
                style = {"stroke": _LINE, "stroke_dasharray": "2 2"}
            at = left + thread * (_CPU + _CPU_GAP)
            canvas.box(at, top, _CPU, _CPU, fill, rx=4, **style)
            canvas.text(at + _CPU / 2, top + 15, str(cpu.id), fill=ink, font_size=10, text_anchor="middle")
    return y + -(-len(cores) // in_a_row) * (_CPU + _CORE_GAP)


def _draw_memory(canvas: _Canvas, x: float, y: float, node: Node, topology: Topology) -> float:
    """A bar of what is in use and what is available, and the figures; returns where they end."""
    width = _CARD_WIDTH - 2 * _PADDING
    if not node.has_memory:
        canvas.box(x, y, width, 20, _BARRED, rx=4, stroke=_LINE, stroke_dasharray="4 3")
        canvas.text(x, y + 42, "no memory", fill=_MUTED)
        return y + 28 + _LINE_HEIGHT
    available = width * node.memory_available / node.memory_total
    canvas.box(x, y, width, 20, _USED, rx=4)
    canvas.box(x + width - available, y, available, 20, _FREE, rx=4)
    figures = f"{format_bytes(node.memory_available)} of {format_bytes(node.memory_total)} available"
    barred = "" if node.id in topology.allowed_nodes else ", outside Mems_allowed"
    canvas.text(x, y + 42, f"memory: {figures}{barred}")
    return y + 28 + _LINE_HEIGHT


def _draw_distances(canvas: _Canvas, x: float, y: float, topology: Topology) -> float:
    """The table of distances, the darker the further; returns where it ends."""
    ids = [node.id for node in topology.nodes]
    canvas.text(x, y + 16, "distances", font_size=15, font_weight=600)
    top = y + 28
    figures = [node.distances.get(other, 0) for node in topology.nodes for other in ids]
    nearest, furthest = min(figures), max(figures)
    for column, other in enumerate(ids):
        at = x + (column + 1) * _CELL + _CELL / 2
        canvas.text(at, top + 21, str(other), fill=_MUTED, text_anchor="middle")
    for row, node in enumerate(topology.nodes):
        line = top + (row + 1) * _CELL
        canvas.text(x + _CELL / 2, line + 21, str(node.id), fill=_MUTED, text_anchor="middle")
        for column, other in enumerate(ids):
            distance = node.distances.get(other, 0)
            share = (distance - nearest) / (furthest - nearest) if furthest > nearest else 0
            left = x + (column + 1) * _CELL
            canvas.box(left + 1, line + 1, _CELL - 2, _CELL - 2, _shade(share), rx=4)
            canvas.text(left + _CELL / 2, line + 21, str(distance), text_anchor="middle")
    return top + (len(ids) + 1) * _CELL


def _shade(share: float) -> str:
    """From pale green for near (0) to orange for far (1)."""
    near, far = (223, 240, 226), (246, 190, 140)
    red, green, blue = (round(near[part] + (far[part] - near[part]) * share) for part in range(3))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _draw_legend(canvas: _Canvas, x: float, y: float, plan: Plan) -> float:
    """What the colours mean; returns where it ends."""
    canvas.text(x, y + 16, "workers", font_size=15, font_weight=600)
    entries = [
        (
            _WORKER_COLOURS[worker.index % len(_WORKER_COLOURS)],
            f"worker {worker.index}: CPUs {format_list(worker.cpus)}, "
            f"{_count(worker.compute_threads, 'thread')}, memory of node {format_list(worker.memory_nodes)}",
        )
        for unit in plan.units
        for worker in unit.workers
    ]
    entries += [(_IDLE, "usable, not given to a worker"), (_BARRED, "outside affinity or cpuset")]
    entries += [(_USED, "memory in use"), (_FREE, "memory available, file cache included")]
    top = y + 30
    for colour, words in entries:
        canvas.box(x, top, 14, 14, colour, rx=3, stroke=_LINE)
        canvas.text(x + 22, top + 12, words)
        top += _LINE_HEIGHT + 4
    for refusal in plan.refusals:
        canvas.text(x, top + 12, f"refused: {refusal.subject}: {refusal.reason}", fill="#b02a37")
        top += _LINE_HEIGHT + 4
    return top
