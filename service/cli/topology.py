"""Show the host's nodes, CPUs, memory and devices, and what this process may use of them."""

from __future__ import annotations

from placement.topology_report import add_arguments, run

__all__ = ["add_arguments", "run"]
