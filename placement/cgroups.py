"""What control groups (v1 and v2, nested) leave to this process: CPUs, memory nodes, memory, CPU time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from placement.cpulist import ListError, parse_kernel_list

# cgroup v1 writes "no limit" as the largest page-rounded number.
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on the cgroup path of this process. All figures are in bytes.

    `usage` counts what is charged to that group, `reclaimable` the part of it that is file cache and yields
    under pressure.
    """

    path: str
    limit: int
    usage: int
    reclaimable: int

    @property
    def available(self) -> int:
        """Bytes that can still be allocated under this limit."""
        return max(0, self.limit - max(0, self.usage - self.reclaimable))


@dataclass(frozen=True)
class CgroupLimits:
    """What the control groups say. None where they say nothing."""

    cpus: tuple[int, ...] | None
    memory_nodes: tuple[int, ...] | None
    memory: tuple[MemoryLimit, ...]
    cpu_quota: float | None


def read_cgroup_limits(sysfs: Path, procfs: Path) -> CgroupLimits:
    """Read the limits of the calling process from `procfs`/self/{cgroup,mountinfo} and the hierarchies under
    `sysfs`.

    A memory limit counts on every level of the path, see cgroups(7); all those that are set are returned,
    innermost first.
    """
    paths = _paths_of_self(procfs)
    memory: list[MemoryLimit] = []
    cpus = nodes = None
    quotas: list[float] = []
    for mount in _mounts(sysfs, procfs):
        path = paths.get("" if mount.version == 2 else mount.controller_in(paths))
        if path is None:
            continue
        levels = mount.levels(path)
        if mount.version == 2 or "memory" in mount.controllers:
            memory.extend(limit for level in levels for limit in _memory_limit(level, mount.version))
        if mount.version == 2 or "cpuset" in mount.controllers:
            cpus = cpus or _first_list(
                levels, ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
            )
            nodes = nodes or _first_list(
                levels, ("cpuset.mems.effective", "cpuset.effective_mems", "cpuset.mems")
            )
        if mount.version == 2 or "cpu" in mount.controllers:
            quotas.extend(quota for level in levels for quota in _cpu_quota(level, mount.version))
    return CgroupLimits(cpus, nodes, tuple(memory), min(quotas, default=None))


@dataclass(frozen=True)
class _Mount:
    version: int
    controllers: tuple[str, ...]
    root: str
    directory: Path

    def controller_in(self, paths: dict[str, str]) -> str:
        return next((controller for controller in self.controllers if controller in paths), "?")

    def levels(self, path: str) -> list[Path]:
        """The directories from the process's group up to what is mounted here. In a container the upper
        levels are hidden.
        """
        if self.root != "/":
            inside = path == self.root or path.startswith(self.root + "/")
            path = path[len(self.root) :] if inside else "/"
        parts = [part for part in path.split("/") if part]
        # A path of "/.." means a group outside this namespace: only the mount itself can be seen.
        if ".." in parts or not (self.directory / "/".join(parts)).is_dir():
            parts = []
        return [self.directory.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _paths_of_self(procfs: Path) -> dict[str, str]:
    """Controller -> path of this process in its hierarchy; the unified hierarchy is under ""."""
    paths = {}
    for line in (read_text(procfs / "self" / "cgroup") or "").splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            for controller in fields[1].split(","):
                paths[controller] = fields[2]
    return paths


def _mounts(sysfs: Path, procfs: Path) -> list[_Mount]:
    mounts = []
    for line in (read_text(procfs / "self" / "mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, after = left.split(), right.split()
        if len(fields) < 5 or len(after) < 3 or after[0] not in ("cgroup", "cgroup2"):
            continue
        directory = Path(fields[4])
        if fields[4].startswith("/sys/"):
            directory = sysfs / fields[4][len("/sys/") :]
        version = 2 if after[0] == "cgroup2" else 1
        mounts.append(_Mount(version, tuple(after[2].split(",")), fields[3], directory))
    return mounts


def _memory_limit(level: Path, version: int) -> list[MemoryLimit]:
    if version == 2:
        # Above memory.high a group is throttled until it all but stands still: as hard a limit for a server.
        limits = [read_int(level / "memory.max"), read_int(level / "memory.high")]
        usage, prefix = read_int(level / "memory.current"), ""
    else:
        limits = [read_int(level / "memory.limit_in_bytes")]
        usage, prefix = read_int(level / "memory.usage_in_bytes"), "total_"
    finite = [limit for limit in limits if limit is not None and limit < _UNLIMITED]
    if not finite:
        return []
    fields = dict(
        line.split()
        for line in (read_text(level / "memory.stat") or "").splitlines()
        if len(line.split()) == 2
    )
    reclaimable = sum(int(fields.get(prefix + name, 0)) for name in ("active_file", "inactive_file"))
    return [MemoryLimit(str(level), min(finite), usage or 0, reclaimable)]


def _cpu_quota(level: Path, version: int) -> list[float]:
    """CPUs' worth of time that CFS bandwidth control grants, empty where it is unlimited."""
    if version == 2:
        fields = (read_text(level / "cpu.max") or "max").split()
        quota = int(fields[0]) if fields[0].isdigit() else -1
        period = int(fields[1]) if len(fields) > 1 else 100_000
    else:
        quota = read_int(level / "cpu.cfs_quota_us") or -1
        period = read_int(level / "cpu.cfs_period_us") or 100_000
    return [quota / period] if quota > 0 else []


def _first_list(levels: list[Path], names: tuple[str, ...]) -> tuple[int, ...] | None:
    """The innermost list that is not empty: an empty one inherits from the level above."""
    for level in levels:
        for name in names:
            try:
                ids = parse_kernel_list(read_text(level / name) or "", str(level / name))
            except ListError:
                continue
            if ids:
                return ids
    return None


def read_text(path: Path) -> str | None:
    """The stripped contents of a kernel file, None where it is missing or cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """A kernel file that holds one integer, None where it is missing, unreadable or holds something else."""
    text = read_text(path)
    try:
        return int(text, 0) if text else None
    except ValueError:
        return None
