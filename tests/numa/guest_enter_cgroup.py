"""Run a command in a new cgroup: guest_enter_cgroup.py NAME=VALUE[,NAME=VALUE...] COMMAND [ARGUMENT...]

NAME is a file of the group without the controller's version, such as cpuset.mems or memory.max.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def enter(settings: dict[str, str]) -> None:
    """Make a group with these settings and join it."""
    (ROOT / "cgroup.subtree_control").write_text("+cpuset +memory")
    group = ROOT / f"test-{os.getpid()}"
    group.mkdir()
    for name, value in settings.items():
        (group / name).write_text(value)
    (group / "cgroup.procs").write_text(str(os.getpid()))


if __name__ == "__main__":
    enter(dict(setting.split("=", 1) for setting in sys.argv[1].split(",")))
    os.execvp(sys.argv[2], sys.argv[2:])
