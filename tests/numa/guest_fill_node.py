"""Take a node's memory until a given number of MiB is available there: guest_fill_node.py NODE MIB

Prints a line once it has; lets go when its standard input ends.
"""

from __future__ import annotations

import sys

from placement import numa
from placement.mapping import Mapping
from placement.topology import read_topology

STEP = 16 << 20
MADV_POPULATE_WRITE = 23


def main() -> None:
    node, left = int(sys.argv[1]), int(sys.argv[2]) << 20
    taken = []
    while read_topology().node(node).memory_available > left + STEP:
        mapping = Mapping.anonymous(STEP, "filler")
        numa.mbind(mapping.address, mapping.length, numa.MPOL_BIND, [node])
        assert mapping.advise(MADV_POPULATE_WRITE)
        taken.append(mapping)
    print(f"{len(taken) * STEP >> 20} MiB taken", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
