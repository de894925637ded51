"""Cores for workers: disjoint slices of a node's CPUs, physical cores first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from placement.topology import Cpu

_T = TypeVar("_T")

# From this many physical cores on, one is left to the event loop; with fewer the loss would be too dear.
_CORES_TO_SPARE_ONE = 4


@dataclass(frozen=True)
class CoreSlice:
    """The CPUs of one worker: one CPU of each of its physical cores first, then the SMT siblings of those.

    `shared` is True where another worker runs on the same CPUs, because there are fewer CPUs than workers.
    """

    cpus: tuple[int, ...]
    physical_cores: int
    shared: bool

    @property
    def compute_threads(self) -> int:
        """Threads that keep the physical cores busy; from four cores on, one is left to the event loop."""
        return self.physical_cores - 1 if self.physical_cores >= _CORES_TO_SPARE_ONE else self.physical_cores


def count_physical_cores(cpus: Iterable[Cpu]) -> int:
    """The number of distinct physical cores among `cpus`."""
    return len({cpu.core for cpu in cpus})


def slice_cores(cpus: Sequence[Cpu], workers: int) -> tuple[CoreSlice, ...]:
    """Divide the usable CPUs of one node among its workers. Raises ValueError without CPUs or workers.

    Whole cores are dealt out while there is one for each worker, then single CPUs; with more workers than
    CPUs they share.
    """
    if not cpus or workers < 1:
        raise ValueError(f"cannot divide {len(cpus)} CPUs among {workers} workers")
    cores: dict[int, list[int]] = defaultdict(list)
    for cpu in sorted(cpus, key=lambda cpu: cpu.id):
        cores[cpu.core].append(cpu.id)
    # Cores in the order of the CPU that stands for each: the lowest one that may be used.
    members = sorted(cores.values())
    if workers <= len(members):
        return tuple(_whole_cores(part) for part in _divide(members, workers))
    core_of = {cpu.id: cpu.core for cpu in cpus}
    logical = [cpu for core in members for cpu in core]
    if workers <= len(logical):
        parts = _divide(logical, workers)
        return tuple(CoreSlice(tuple(part), len({core_of[cpu] for cpu in part}), False) for part in parts)
    counts = [index * len(logical) // workers for index in range(workers)]
    return tuple(CoreSlice((logical[position],), 1, True) for position in counts)


def _whole_cores(cores: Sequence[list[int]]) -> CoreSlice:
    first = tuple(core[0] for core in cores)
    siblings = tuple(cpu for core in cores for cpu in core[1:])
    return CoreSlice(first + siblings, len(cores), False)


def _divide(items: Sequence[_T], parts: int) -> list[Sequence[_T]]:
    """Contiguous parts whose lengths differ by at most one, the longer ones first."""
    length, longer = divmod(len(items), parts)
    starts = [index * length + min(index, longer) for index in range(parts + 1)]
    return [items[starts[index] : starts[index + 1]] for index in range(parts)]
