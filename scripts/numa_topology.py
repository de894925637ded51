#!/usr/bin/env python3
"""Show the NUMA topology of this host and what a process may use of it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from placement.topology_report import add_arguments, run


def main() -> int:
    """Parse the command line and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
