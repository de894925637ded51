"""Binding a process and a mapping to a unit's CPUs and memory. A refusal is reported in words, never fatal.

CPU affinity needs no capability, and with it first touch places pages; the memory policy is the belt to those braces.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from placement import numa
from placement.cpulist import format_list
from placement.mapping import HUGE_PAGE, Mapping, round_up
from placement.permissions import Refused, refused_by
from placement.plan import Policy
from placement.sizes import format_bytes

_EVEN_STRIPES = 256
_MOST_STRIPES = 4096


@dataclass(frozen=True)
class Binding:
    """The outcome of one step: what was asked, and why it was refused (None when it held)."""

    step: str
    refused: Refused | None = None

    @property
    def errno(self) -> int:
        """Why it was refused, 0 when it held."""
        return 0 if self.refused is None else self.refused.code

    def __str__(self) -> str:
        return self.step if self.refused is None else f"{self.step}: {self.refused}"


def _attempt(step: str, call: str, action: Callable[[], object]) -> Binding:
    try:
        action()
    except OSError as error:
        return Binding(step, refused_by(error, call))
    return Binding(step)


def bind_process(cpus: Collection[int], memory_nodes: Sequence[int], strict: bool) -> tuple[Binding, ...]:
    """Pin this process to `cpus` and make `memory_nodes` its memory policy; what it starts inherits both.

    `strict` is MPOL_BIND (`--membind`), for which the kernel wakes the OOM killer when the nodes are full; otherwise
    one node is MPOL_PREFERRED, which spills, and several are left to first touch. See set_mempolicy(2).
    """
    pinned = _attempt(f"cpus {format_list(cpus)}", "sched_setaffinity", lambda: os.sched_setaffinity(0, cpus))
    nodes = format_list(memory_nodes)
    if strict:
        return pinned, _attempt(
            f"memory policy bind {nodes}",
            "set_mempolicy",
            lambda: numa.set_mempolicy(numa.MPOL_BIND, memory_nodes),
        )
    if len(memory_nodes) == 1:
        return pinned, _attempt(
            f"memory policy preferred {nodes}",
            "set_mempolicy",
            lambda: numa.set_mempolicy(numa.MPOL_PREFERRED, memory_nodes),
        )
    return (pinned,)


def bind_mapping(mapping: Mapping, nodes: Sequence[int], policy: Policy) -> Binding:
    """Bind a mapping's pages to `nodes` before their first touch. See mbind(2).

    The policy of a shared mapping belongs to its file, so one process binds once for all.
    """
    if policy is Policy.INTERLEAVE and len(nodes) > 1:
        return _bind_stripes(mapping, nodes)
    return _attempt(
        f"mbind bind {format_list(nodes)}",
        "mbind",
        lambda: numa.mbind(mapping.address, mapping.length, numa.MPOL_BIND, nodes),
    )


def _bind_stripes(mapping: Mapping, nodes: Sequence[int]) -> Binding:
    """Bind stripe after stripe to one node after the other.

    MPOL_INTERLEAVE would go to another node as soon as one has no free page, before it takes back file cache there.
    """
    stripe = stripe_bytes(mapping.length)

    def bind_all() -> None:
        for number, start in enumerate(range(0, mapping.length, stripe)):
            length = min(stripe, mapping.length - start)
            node = nodes[number % len(nodes)]
            numa.mbind(mapping.address + start, length, numa.MPOL_BIND, [node])

    return _attempt(f"mbind stripes of {format_bytes(stripe)} on {format_list(nodes)}", "mbind", bind_all)


def stripe_bytes(length: int) -> int:
    """How much of an interleaved mapping lies on one node before the next: whole huge pages where it is large.

    At least 256 stripes keep the nodes' shares within 1 %. At most 4096 keep far from vm.max_map_count (65,530), as
    each is a mapping of its own in the process that binds.
    """
    if length >= _EVEN_STRIPES * HUGE_PAGE:
        return round_up(-(-length // _MOST_STRIPES), HUGE_PAGE)
    return round_up(-(-length // _EVEN_STRIPES), mmap.PAGESIZE)
