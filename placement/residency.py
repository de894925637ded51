"""Where pages really are: per node, by move_pages(2) or numa_maps (numa(7)), and the memory of a process from
smaps.
"""

from __future__ import annotations

import enum
import errno
import mmap
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from placement import numa
from placement.cpulist import format_list
from placement.permissions import Refused, refused_by

_CHUNK_PAGES = 1 << 16
_EVEN_WITHIN = 0.01


class Method(enum.Enum):
    """How pages were counted."""

    MOVE_PAGES = "move_pages"
    NUMA_MAPS = "numa_maps"
    NONE = "none"


@dataclass(frozen=True)
class Residency:
    """Pages of a range. All counts are in base pages of `page_size` bytes, whatever size backs them.

    `pages` maps a node to its pages. `untouched` pages are not present in the mapping that was looked at;
    `unknown` ones are present, but the kernel would not say where. `refused` is the refusal that led away
    from move_pages, if any.
    """

    pages: Mapping[int, int]
    untouched: int
    unknown: int
    page_size: int
    method: Method
    refused: Refused | None = None

    @property
    def present(self) -> int:
        """Pages whose node is known."""
        return sum(self.pages.values())

    def on(self, nodes: Collection[int]) -> int:
        """Pages on any of `nodes`."""
        return sum(count for node, count in self.pages.items() if node in nodes)


class VerdictKind(enum.Enum):
    """The outcome in the words that log, status and metrics use."""

    BOUND = "bound"
    PARTLY_BOUND = "partly bound"
    UNBOUND = "unbound"


@dataclass(frozen=True)
class Verdict:
    """`kind` in one word and `explanation` in a sentence. `local` is whether every page was found where it was
    wanted (interleaved: evenly), which first touch can achieve although no policy could be set.
    """

    kind: VerdictKind
    explanation: str
    local: bool

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.explanation}"


@dataclass(frozen=True)
class ProcessMemory:
    """Proportional set size of a process in bytes, and the parts of it that are weights and KV cache."""

    pss: int
    weights_pss: int
    kv_pss: int = 0


def pages_per_node(address: int, length: int, pid: int = 0, procfs: Path = Path("/proc")) -> Residency:
    """Count the pages of [address, address + length) per node, in the mapping of process `pid` (0: this one).

    A page that this mapping has not faulted in counts as untouched, although another process may have filled
    it: map with MAP_POPULATE first. So does, for a while, unbound memory that automatic NUMA balancing is
    sampling. Where move_pages is refused, `procfs`/PID/numa_maps answers for the mappings that the range
    covers. Raises ValueError for an empty range.
    """
    if length <= 0:
        raise ValueError(f"length must be positive, got {length}")
    start = address - address % mmap.PAGESIZE
    end = address + length + -(address + length) % mmap.PAGESIZE
    try:
        return _by_move_pages(start, end, pid)
    except OSError as error:
        refused = refused_by(error)
    counted = _by_numa_maps(start, end, pid, procfs, refused)
    if counted is not None:
        return counted
    return Residency({}, 0, (end - start) // mmap.PAGESIZE, mmap.PAGESIZE, Method.NONE, refused)


def misplaced_pages(address: int, length: int, wanted_nodes: Collection[int], pid: int = 0) -> list[int]:
    """Addresses of the pages of a range that lie on none of `wanted_nodes`. Raises NumaCallError."""
    wrong: list[int] = []
    for chunk in _page_chunks(address, address + length):
        statuses = numa.move_pages(chunk, pid=pid)
        wrong += [
            page
            for page, status in zip(chunk, statuses, strict=True)
            if status >= 0 and status not in wanted_nodes
        ]
    return wrong


def judge(
    residency: Residency,
    wanted_nodes: Collection[int],
    refused_calls: Iterable[Refused] = (),
    interleaved: bool = False,
) -> Verdict:
    """Say whether memory is where it was wanted, from counted pages and from the calls that were refused.

    BOUND takes both: a policy that the kernel accepted and every page found on `wanted_nodes`, with
    `interleaved` also evenly (each node's share within 1 % of the pages). Pages that are right by first touch
    alone, because mbind was refused, are UNBOUND but `local`.
    """
    refused = list(refused_calls)
    total = residency.present + residency.untouched + residency.unknown
    reasons = "".join(f"; {item}" for item in refused)
    if residency.method is Method.NUMA_MAPS:
        reasons += "; counted through numa_maps because move_pages is refused"
    wanted = format_list(wanted_nodes)
    where = f"node {wanted}" if len(wanted_nodes) == 1 else f"nodes {wanted}"
    if residency.method is Method.NONE:
        text = f"the {total} pages could not be counted, so nothing is proven; {residency.refused}{reasons}"
        return Verdict(VerdictKind.UNBOUND, text, local=False)
    if residency.present == 0:
        return Verdict(VerdictKind.UNBOUND, f"none of {total} pages is in memory yet{reasons}", local=False)
    right = residency.on(wanted_nodes)
    known = residency.present + residency.unknown
    local = right == known
    gaps = _gaps(residency)
    if not local:
        text = f"{right} of {known} pages on {where}, {_rest(residency, wanted_nodes)}{gaps}{reasons}"
        return Verdict(VerdictKind.PARTLY_BOUND if right else VerdictKind.UNBOUND, text, local=False)
    if any(item.call == "mbind" for item in refused):
        text = f"all {known} pages on {where} by first touch, but no policy holds them there{gaps}{reasons}"
        return Verdict(VerdictKind.UNBOUND, text, local=True)
    if interleaved and not _even(residency, wanted_nodes):
        shares = ", ".join(f"{residency.pages.get(node, 0)} on node {node}" for node in sorted(wanted_nodes))
        text = f"all {known} pages on {where}, but not evenly: {shares}{gaps}{reasons}"
        return Verdict(VerdictKind.PARTLY_BOUND, text, local=False)
    evenly = ", evenly" if interleaved and len(wanted_nodes) > 1 else ""
    return Verdict(VerdictKind.BOUND, f"all {known} pages on {where}{evenly}{gaps}{reasons}", local=True)


def judge_cache(
    residency: Residency, wanted_nodes: Collection[int], refused_calls: Iterable[Refused] = ()
) -> Verdict:
    """As `judge`, for memory that is touched only as it is used: none of it in memory is no fault."""
    refused = list(refused_calls)
    if residency.method is Method.NONE or residency.present or residency.unknown:
        return judge(residency, wanted_nodes, refused)
    where = f"node{'s' if len(wanted_nodes) != 1 else ''} {format_list(wanted_nodes)}"
    if any(item.call == "mbind" for item in refused):
        reasons = "".join(f"; {item}" for item in refused)
        text = f"first touch places its pages, none of {residency.untouched} used yet{reasons}"
        return Verdict(VerdictKind.UNBOUND, text, local=True)
    text = f"held to {where}, none of {residency.untouched} pages used yet"
    return Verdict(VerdictKind.BOUND, text, local=True)


def judge_page_cache(residency: Residency, wanted_nodes: Collection[int]) -> Verdict:
    """As `judge`, for files that are mapped: no policy holds page cache (mbind(2)), so never BOUND, but perhaps `local`."""
    verdict = judge(residency, wanted_nodes)
    if not verdict.local:
        why = "page cache lies where its first reader ran"
        return Verdict(verdict.kind, f"{verdict.explanation}; {why}", local=False)
    text = f"{verdict.explanation}, in the page cache of the checkpoint, which no policy holds there"
    return Verdict(VerdictKind.UNBOUND, text, local=True)


def merge(residencies: Sequence[Residency]) -> Residency:
    """Several ranges as one; the least reliable method is the whole's."""
    pages: Counter[int] = Counter()
    for residency in residencies:
        pages.update(residency.pages)
    methods = [residency.method for residency in residencies]
    return Residency(
        pages=dict(sorted(pages.items())),
        untouched=sum(residency.untouched for residency in residencies),
        unknown=sum(residency.unknown for residency in residencies),
        page_size=mmap.PAGESIZE,
        method=next((method for method in reversed(Method) if method in methods), Method.NONE),
        refused=next((residency.refused for residency in residencies if residency.refused), None),
    )


def process_memory(
    pid: int,
    name_contains: str | Collection[str] | None = None,
    kv_address: int = 0,
    procfs: Path = Path("/proc"),
) -> ProcessMemory:
    """Proportional set size of a process, and of its mappings whose path contains `name_contains` (or any of them), from
    smaps (proc(5)).

    The mapping that starts at `kv_address` counts as KV cache: anonymous memory has no path to know it by.
    Without `name_contains` the cheaper smaps_rollup is read. Raises OSError where the process is gone or
    belongs to another user.
    """
    directory = procfs / str(pid)
    if name_contains is None:
        try:
            rollup = (directory / "smaps_rollup").read_text()
            return ProcessMemory(sum(pss for _, _, pss in _pss_by_mapping(rollup)), 0)
        except FileNotFoundError:
            # Kernels before 4.14 have no rollup; a process that is gone has no smaps either.
            pass
    names = (name_contains,) if isinstance(name_contains, str) else name_contains or ()
    total = weights = kv_cache = 0
    for address, path, pss in _pss_by_mapping((directory / "smaps").read_text(errors="replace")):
        total += pss
        if any(name in path for name in names):
            weights += pss
        if kv_address and address == kv_address:
            kv_cache += pss
    return ProcessMemory(total, weights, kv_cache)


def _by_move_pages(start: int, end: int, pid: int) -> Residency:
    statuses: Counter[int] = Counter()
    for chunk in _page_chunks(start, end):
        statuses.update(numa.move_pages(chunk, pid=pid))
    pages = {status: count for status, count in sorted(statuses.items()) if status >= 0}
    # -EFAULT is a zero page or a hole: nothing of this mapping's own is in memory there.
    untouched = statuses[-errno.ENOENT] + statuses[-errno.EFAULT]
    unknown = sum(statuses.values()) - sum(pages.values()) - untouched
    return Residency(pages, untouched, unknown, mmap.PAGESIZE, Method.MOVE_PAGES)


def _page_chunks(start: int, end: int) -> Iterator[range]:
    step = _CHUNK_PAGES * mmap.PAGESIZE
    for chunk in range(start, end, step):
        yield range(chunk, min(chunk + step, end), mmap.PAGESIZE)


def _by_numa_maps(start: int, end: int, pid: int, procfs: Path, refused: Refused) -> Residency | None:
    """Count from numa_maps: a line per mapping, with counts in units of that mapping's page size."""
    directory = procfs / (str(pid) if pid else "self")
    try:
        maps = (directory / "maps").read_text(errors="replace")
        numa_maps = (directory / "numa_maps").read_text(errors="replace")
    except OSError:
        return None
    covered = {first: last for first, last in _ranges(maps) if first < end and last > start}
    pages: Counter[int] = Counter()
    span = 0
    for line in numa_maps.splitlines():
        first = int(line.split(" ", 1)[0], 16)
        if first not in covered:
            continue
        # A mapping that reaches over the range cannot be split: its pages count whole.
        span += covered[first] - first
        size = re.search(r"kernelpagesize_kB=(\d+)", line)
        per_page = int(size[1]) * 1024 // mmap.PAGESIZE if size else 1
        for node, count in re.findall(r"\bN(\d+)=(\d+)", line):
            pages[int(node)] += int(count) * per_page
    if not span:
        return None
    untouched = max(0, span // mmap.PAGESIZE - sum(pages.values()))
    return Residency(dict(sorted(pages.items())), untouched, 0, mmap.PAGESIZE, Method.NUMA_MAPS, refused)


def _ranges(maps: str) -> Iterator[tuple[int, int]]:
    for line in maps.splitlines():
        first, _, last = line.split(" ", 1)[0].partition("-")
        yield int(first, 16), int(last, 16)


def _pss_by_mapping(smaps: str) -> Iterator[tuple[int, str, int]]:
    """(start of the mapping, its path, its PSS in bytes) for each mapping of an smaps text."""
    path, address = "", 0
    for line in smaps.splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            fields = line.split(None, 5)
            address = int(line.split("-", 1)[0], 16)
            path = fields[5] if len(fields) > 5 else ""
        elif line.startswith("Pss:"):
            yield address, path, int(line.split()[1]) * 1024


def _rest(residency: Residency, wanted: Collection[int]) -> str:
    """Where the pages are that are not on a wanted node."""
    others = [
        f"node {node} ({count})" for node, count in sorted(residency.pages.items()) if node not in wanted
    ]
    if residency.unknown:
        others.append(f"an unknown node ({residency.unknown})")
    if len(others) == 1:
        return f"the rest on {others[0].rsplit(' (', 1)[0]}"
    return f"the rest on {', '.join(others)}"


def _gaps(residency: Residency) -> str:
    return f" ({residency.untouched} more not in memory)" if residency.untouched else ""


def _even(residency: Residency, nodes: Collection[int]) -> bool:
    # One page more or less is the remainder of the division, not a skew.
    allowed = max(1.0, _EVEN_WITHIN * residency.present)
    fair = residency.present / len(nodes)
    return all(abs(residency.pages.get(node, 0) - fair) <= allowed for node in nodes)
