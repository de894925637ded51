"""Measures again where the pages of a running server are: every segment in every process that maps it, every KV cache.

It looks into other processes of the same user: move_pages(2) with their pid, or their numa_maps (proc(5)).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from placement import numa
from placement.board import BoardRow
from placement.file_segment import WeightsFile
from placement.messages import SegmentState, ServerState, WorkerPlace
from placement.permissions import Refused, explain_refusal, refused_by
from placement.plan import Policy
from placement.residency import (
    Method,
    Residency,
    Verdict,
    VerdictKind,
    judge,
    judge_cache,
    judge_page_cache,
    merge,
    misplaced_pages,
    pages_per_node,
)
from placement.segment import MEMFD_PREFIX


@dataclass(frozen=True)
class Sight:
    """What one process's mapping shows."""

    pid: int
    residency: Residency


@dataclass(frozen=True)
class Check:
    """One segment, or one worker's KV cache, measured again.

    `worker` is -1 for a segment. `nodes` are the wanted ones. `verdict.local` says that no page is remote and that
    something was measured.
    """

    unit: str
    worker: int
    nodes: tuple[int, ...]
    verdict: Verdict
    sights: tuple[Sight, ...] = ()


@dataclass(frozen=True)
class Repair:
    """What moving a cache's pages came to. `refused` is the refusal that stopped it, if any."""

    moved: int
    left: int
    refused: Refused | None = None

    def __str__(self) -> str:
        if self.refused is not None:
            return f"{self.moved} pages moved, then {self.refused}"
        return f"{self.moved} pages moved" + (f", {self.left} would not move" if self.left else "")


def verify_segments(state: ServerState, procfs: Path = Path("/proc")) -> list[Check]:
    """Every segment, as each process of the server that maps it sees it.

    A segment is told by its memfd's inode, so that while weights are replaced the old and the new are both looked at.
    """
    pids = [*state.helper_pids, *(place.pid for place in state.workers if place.pid)]
    mappings: dict[str, dict[int, list[tuple[int, int, int]]]] = {}
    for pid in pids:
        for unit, inode, start, end in _mapped_segments(pid, procfs):
            mappings.setdefault(unit, {}).setdefault(inode, []).append((pid, start, end))
    interleaved = state.placement_policy == Policy.INTERLEAVE.value
    checks = []
    for segment in state.segments:
        if segment.files:
            checks.append(_check_files(segment, pids, procfs))
            continue
        found = mappings.get(segment.unit, {})
        if not found:
            text = "no process of the server that may be looked at maps it, so nothing is proven"
            verdict = Verdict(VerdictKind.UNBOUND, text, local=False)
            checks.append(Check(segment.unit, -1, segment.memory_nodes, verdict))
        for places in found.values():
            sights = tuple(
                Sight(
                    pid, pages_per_node(start + segment.data_offset, end - start - segment.data_offset, pid)
                )
                for pid, start, end in places
            )
            checks.append(_check_segment(segment, sights, interleaved))
    return checks


def _check_files(segment: SegmentState, pids: list[int], procfs: Path) -> Check:
    """Weights in the checkpoint's own files: their page cache, and whether they are still what was loaded."""
    files = [WeightsFile(*fields) for fields in segment.files]
    sights = []
    for pid in pids:
        ranges = _mapped_files(pid, {file.path for file in files}, procfs)
        if ranges:
            sights.append(
                Sight(pid, merge([pages_per_node(start, end - start, pid) for start, end in ranges]))
            )
    if not sights:
        text = "no process of the server that may be looked at maps them, so nothing is proven"
        return Check(segment.unit, -1, segment.memory_nodes, Verdict(VerdictKind.UNBOUND, text, local=False))
    fullest = max(sights, key=lambda sight: sight.residency.present)
    verdict = judge_page_cache(fullest.residency, segment.memory_nodes)
    changes = [change for file in files if (change := file.change())]
    if changes:
        text = f"{verdict.explanation}; {'; '.join(changes)}: what is served may not be what the digest says"
        verdict = Verdict(verdict.kind, text, local=False)
    return Check(segment.unit, -1, segment.memory_nodes, verdict, tuple(sights))


def verify_cache(place: WorkerPlace, row: BoardRow) -> Check:
    """One worker's KV cache; `row` is its row of the board."""
    if not place.pid or not row.kv_cache_address:
        why = "has not reported its cache yet" if place.pid else "is not running"
        verdict = Verdict(VerdictKind.UNBOUND, f"worker {place.index} {why}, nothing to measure", local=False)
        return Check(place.unit, place.index, place.memory_nodes, verdict)
    residency = pages_per_node(row.kv_cache_address, row.kv_cache_bytes, place.pid)
    verdict = judge_cache(residency, place.memory_nodes, _refusals(place.mbind_errno))
    return Check(place.unit, place.index, place.memory_nodes, verdict, (Sight(place.pid, residency),))


def repair_cache(place: WorkerPlace, row: BoardRow) -> Repair:
    """Move the pages of a worker's KV cache that are on a wrong node: no other process maps them. See move_pages(2)."""
    start, length, nodes = row.kv_cache_address, row.kv_cache_bytes, place.memory_nodes
    before = left = 0
    try:
        wrong = misplaced_pages(start, length, nodes, place.pid)
        before = left = len(wrong)
        for node in nodes:
            if wrong:
                numa.move_pages(wrong, [node] * len(wrong), place.pid)
                wrong = misplaced_pages(start, length, nodes, place.pid)
                left = len(wrong)
        return Repair(before - left, left)
    except OSError as error:
        return Repair(before - left, left, refused_by(error))


def _check_segment(segment: SegmentState, sights: tuple[Sight, ...], interleaved: bool) -> Check:
    refused = _refusals(segment.mbind_errno)
    verdicts = {
        sight.pid: judge(sight.residency, segment.memory_nodes, refused, interleaved) for sight in sights
    }
    # A process maps pages as it touches them: the one that has most of them proves most. One remote page is enough.
    fullest = max(sights, key=lambda sight: sight.residency.present)
    verdict = verdicts[fullest.pid]
    for sight in sights:
        touched = sight.residency.present or sight.residency.unknown
        if verdict.local and touched and not verdicts[sight.pid].local:
            verdict = verdicts[sight.pid]
    uncounted = [str(sight.pid) for sight in sights if sight.residency.method is Method.NONE]
    if uncounted and verdict.local:
        text = f"{verdict.explanation}; not counted in pid {', '.join(uncounted)}"
        verdict = Verdict(verdict.kind, text, local=False)
    return Check(segment.unit, -1, segment.memory_nodes, verdict, sights)


def _refusals(mbind_errno: int) -> list[Refused]:
    """The refusal of mbind that another process of this server met: the same filter and capabilities hold here."""
    return [explain_refusal("mbind", mbind_errno)] if mbind_errno else []


def _mapped_files(pid: int, paths: Collection[str], procfs: Path) -> list[tuple[int, int]]:
    """(start, end) of every mapping of the files; nothing where the process is gone."""
    try:
        maps = (procfs / str(pid) / "maps").read_text(errors="replace")
    except OSError:
        return []
    found = []
    for line in maps.splitlines():
        fields = line.split(None, 5)
        if len(fields) > 5 and fields[5].removesuffix(" (deleted)") in paths:
            start, _, end = fields[0].partition("-")
            found.append((int(start, 16), int(end, 16)))
    return found


def _mapped_segments(pid: int, procfs: Path) -> Iterator[tuple[str, int, int, int]]:
    """(unit, inode, start, end) of every segment that a process maps; nothing where it is gone."""
    try:
        maps = (procfs / str(pid) / "maps").read_text(errors="replace")
    except OSError:
        return
    prefix = f"/memfd:{MEMFD_PREFIX}"
    ranges: dict[tuple[str, int], list[int]] = {}
    for line in maps.splitlines():
        fields = line.split(None, 5)
        path = fields[5].removesuffix(" (deleted)") if len(fields) > 5 else ""
        if path.startswith(prefix):
            start, _, end = fields[0].partition("-")
            # madvise splits a mapping into several entries that follow each other.
            ends = ranges.setdefault((path.removeprefix(prefix), int(fields[4])), [])
            ends += [int(start, 16), int(end, 16)]
    for (unit, inode), ends in ranges.items():
        yield unit, inode, min(ends), max(ends)
