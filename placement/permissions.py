"""Which placement calls are permitted here, found out by making them, and what would lift a refusal."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from placement import numa
from placement.cgroups import read_text

_CAP_SYS_NICE = 23
# Docker's and containerd's profiles allow the other calls to whoever has CAP_SYS_NICE, these to nobody.
_IN_NO_DEFAULT_PROFILE = ("move_pages", "migrate_pages")
_PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class Refused:
    """A call that the kernel or a container's filter refused: which, with which errno, why, and what would
    lift it.
    """

    call: str
    code: int
    reason: str
    remedy: str

    def __str__(self) -> str:
        name = errno.errorcode.get(self.code, str(self.code))
        return f"{self.call} refused ({name}: {self.reason}); {self.remedy}"


@dataclass(frozen=True)
class Permission:
    """Whether `call` works here; `refused` says why not, None where it works."""

    call: str
    refused: Refused | None = None

    @property
    def permitted(self) -> bool:
        """Whether the call works here."""
        return self.refused is None


@dataclass(frozen=True)
class Permissions:
    """The outcome for every call that placement makes."""

    calls: tuple[Permission, ...]

    @property
    def refused(self) -> tuple[Refused, ...]:
        """The refusals, in the order of the calls."""
        return tuple(call.refused for call in self.calls if call.refused is not None)

    def of(self, call: str) -> Permission:
        """The outcome for `call`. Raises KeyError."""
        for permission in self.calls:
            if permission.call == call:
                return permission
        raise KeyError(call)


def probe_permissions(procfs: Path = Path("/proc")) -> Permissions:
    """Make each call once, each in a forked child, so that this process keeps its policy, pages and affinity.

    A filter that kills the caller takes the child alone. Call it from a process that has no threads.
    """
    return Permissions(tuple(_probe(call, action, procfs) for call, action in _PROBES.items()))


def explain_refusal(call: str, code: int, procfs: Path = Path("/proc")) -> Refused:
    """Say why `call` failed with errno `code` and what would lift it, from this process's capabilities and
    filter.
    """
    status = read_text(procfs / "self" / "status") or ""
    filtered = bool(re.search(r"^Seccomp:\s*2$", status, re.MULTILINE))
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    nice = bool(capabilities and int(capabilities[1], 16) >> _CAP_SYS_NICE & 1)
    if code == errno.ENOSYS:
        reason = "the kernel has no NUMA support" + (
            ", or the seccomp profile hides the call" if filtered else ""
        )
        return Refused(
            call, code, reason, f"use a kernel with CONFIG_NUMA or a seccomp profile that allows {call}"
        )
    if code == errno.EINVAL:
        allowed = re.search(r"^Mems_allowed_list:\s*(\S+)$", status, re.MULTILINE)
        reason = (
            f"a node outside Mems_allowed ({allowed[1] if allowed else 'unknown'}), or one without memory"
        )
        return Refused(call, code, reason, "widen cpuset.mems (docker run --cpuset-mems)")
    if code in (errno.EPERM, errno.EACCES):
        if nice and not filtered:
            return Refused(
                call,
                code,
                "a security module or an outer sandbox refuses it",
                f"allow {call} there (docker run --cap-add SYS_NICE)",
            )
        missing = " and the process lacks CAP_SYS_NICE" if not nice else ""
        profile = "a seccomp filter is active" if filtered else "no seccomp filter is active"
        return Refused(call, code, profile + missing, _remedy(call))
    if code == errno.ENOMEM:
        return Refused(call, code, "the kernel had no memory to set it up", "free memory on the node")
    return Refused(call, code, os.strerror(code), "see the call's manual page")


def _remedy(call: str) -> str:
    if call in _IN_NO_DEFAULT_PROFILE:
        profile = f"use a seccomp profile that allows {call} (docker run --security-opt seccomp=FILE)"
        return f"{profile}; Docker's own refuses it with and without CAP_SYS_NICE"
    return f"add CAP_SYS_NICE (docker run --cap-add SYS_NICE) or a seccomp profile that allows {call}"


def refused_by(error: OSError, call: str | None = None) -> Refused:
    """The refusal behind an exception of `placement.numa`, or of another call that `call` names."""
    return explain_refusal(call or str(getattr(error, "call", "call")), error.errno or 0)


def _probe(call: str, action: Callable[[], object], procfs: Path) -> Permission:
    """Run `action` in a child and read the errno that it met."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        code = errno.EIO
        # Whatever happens, the child must not run on in the parent's stack.
        with contextlib.suppress(BaseException):
            code = _errno_of(action)
            os.write(writer, code.to_bytes(4, "little"))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if len(answer) == 4:
        code = int.from_bytes(answer, "little")
        return Permission(call) if code == 0 else Permission(call, explain_refusal(call, code, procfs))
    name = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"status {status}"
    remedy = f"use a seccomp profile that allows {call}"
    return Permission(call, Refused(call, errno.EPERM, f"the caller was ended by {name}", remedy))


def _errno_of(action: Callable[[], object]) -> int:
    try:
        action()
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _own_node() -> int:
    """A node that policies may name. Where the kernel will not say, node 0."""
    status = read_text(Path("/proc/self/status")) or ""
    match = re.search(r"^Mems_allowed_list:\s*(\d+)", status, re.MULTILINE)
    return int(match[1]) if match else 0


def _scratch() -> tuple[mmap.mmap, int]:
    """A private page that has not been touched, and its address."""
    scratch = mmap.mmap(-1, _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return scratch, ctypes.addressof(ctypes.c_char.from_buffer(scratch))


def _try_mbind() -> None:
    _, address = _scratch()
    numa.mbind(address, _PAGE, numa.MPOL_BIND, [_own_node()])


def _try_move_pages() -> None:
    scratch, address = _scratch()
    scratch[0] = 1
    numa.move_pages([address])
    numa.move_pages([address], [_own_node()])


_PROBES: dict[str, Callable[[], object]] = {
    "sched_setaffinity": lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)),
    "set_mempolicy": lambda: numa.set_mempolicy(numa.MPOL_BIND, [_own_node()]),
    "mbind": _try_mbind,
    "get_mempolicy": lambda: numa.get_mempolicy(),
    "move_pages": _try_move_pages,
    "migrate_pages": lambda: numa.migrate_pages([_own_node()], [_own_node()]),
}
