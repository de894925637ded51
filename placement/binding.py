"""Binding a process and a mapping to a unit's CPUs and memory. A refusal is reported in words, never fatal.

CPU affinity needs no capability, and with it first touch places pages; the memory policy is the belt to those braces.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from placement import numa
from placement.cpulist import format_list
from placement.mapping import Mapping
from placement.permissions import Refused, refused_by
from placement.plan import Policy


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
    interleave = policy is Policy.INTERLEAVE
    mode = numa.MPOL_INTERLEAVE if interleave else numa.MPOL_BIND
    step = f"mbind {'interleave' if interleave else 'bind'} {format_list(nodes)}"
    return _attempt(step, "mbind", lambda: numa.mbind(mapping.address, mapping.length, mode, nodes))
