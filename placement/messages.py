"""What the processes of one server tell each other: dataclasses over a SOCK_SEQPACKET pair, descriptors beside them."""

from __future__ import annotations

import array
import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from placement.orders import DrainOrder, OrderDone, Planned, PlanOrder, PlanRefused, ReloadOrder, ScaleOrder

# A packet must fit the socket's buffer (net.core.wmem_default is 212,992 on most hosts); larger ones fail with EMSGSIZE.
_BUFFER_BYTES = 1 << 20
_MAX_DESCRIPTORS = 8


@dataclass(frozen=True)
class ZygoteConfig:
    """Launcher to zygote, once: who it is and what it imports. `service_config` is opaque JSON for the entry points.

    `unit_number` counts the units of the server, `generation` the weights that it has loaded.
    """

    unit: str
    nodes: tuple[int, ...]
    memory_nodes: tuple[int, ...]
    policy: str
    strict_memory: bool
    cpus: tuple[int, ...]
    preload: tuple[str, ...]
    loader_entry: str
    prepare_entry: str
    worker_entry: str
    service_config: str
    log_format: str
    log_level: str
    unit_number: int = 0
    generation: int = 0


@dataclass(frozen=True)
class ZygoteReady:
    """Zygote to launcher: everything is imported. `bindings` says in words what bound and what was refused."""

    pid: int
    bindings: tuple[str, ...]


@dataclass(frozen=True)
class ForkLoader:
    """Launcher to zygote, with the loader's channel: fork a loader."""


@dataclass(frozen=True)
class ForkZygote:
    """Launcher to zygote, with the new zygote's channel: fork a successor, which is told its own ZygoteConfig.

    It has everything imported already, and lets go of the weights.
    """


@dataclass(frozen=True)
class AttachSegment:
    """Launcher to zygote, with the segment's descriptor: map it and prepare to fork workers over it."""

    verdict: str


@dataclass(frozen=True)
class SegmentAttached:
    """Zygote to launcher: the segment is mapped; `error` is empty when all went well."""

    error: str = ""


@dataclass(frozen=True)
class ForkWorker:
    """Launcher to zygote, with the worker's channel and the board: fork a worker.

    `memory_nodes` are those of its KV cache and of what else it allocates. `row` is its row of the board. One that is
    `on_trial` proves itself and waits for StartServing before it listens. One that `replaces` another that died listens
    as soon as it can.
    """

    index: int
    cpus: tuple[int, ...]
    compute_threads: int
    kv_cache_bytes: int
    memory_nodes: tuple[int, ...] = ()
    row: int = 0
    on_trial: bool = False
    replaces: bool = False


@dataclass(frozen=True)
class Forked:
    """Zygote to launcher: the child that an order asked for. `index` is -1 for a loader, -2 for a zygote."""

    index: int
    pid: int
    error: str = ""


@dataclass(frozen=True)
class ChildExited:
    """Zygote to launcher: it reaped a child. `status` is the wait status."""

    pid: int
    status: int


@dataclass(frozen=True)
class LoadProgress:
    """Loader to launcher: bytes of the segment that are filled."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class SegmentBuilt:
    """Loader to launcher, with the sealed read-only descriptor: the segment is filled, judged and sealed.

    `data_offset` is where its tensors begin; `mbind_errno` is why mbind was refused, 0 where the policy was taken.
    `files` are those of `placement.file_segment` where the descriptor is that of a table of weights in files.
    """

    total_bytes: int
    digest: str
    dtype: str
    verdict: str
    explanation: str
    seconds: float
    pages: tuple[tuple[int, int], ...]
    steps: tuple[str, ...]
    data_offset: int = 0
    mbind_errno: int = 0
    files: tuple[tuple[str, int, int, int, int], ...] = ()


@dataclass(frozen=True)
class Failed:
    """Loader or worker to launcher: it cannot go on. `permanent` failures are not tried again."""

    message: str
    permanent: bool


@dataclass(frozen=True)
class WorkerServing:
    """Worker to launcher: it accepts requests; `address` is its own socket.

    `mbind_errno` is why mbind was refused for its KV cache, 0 where the policy was taken. `tcp_address` is its own
    port, empty without one.
    """

    pid: int
    address: str
    mbind_errno: int = 0
    tcp_address: str = ""


@dataclass(frozen=True)
class TrialPassed:
    """Worker to launcher: it has answered a request of its own and could serve."""

    pid: int


@dataclass(frozen=True)
class StartServing:
    """Launcher to worker, after its trial: listen."""


@dataclass(frozen=True)
class DrainWorker:
    """Launcher to worker: refuse new requests, finish the running ones within `timeout_seconds`, exit.

    With `leave_port` siblings go on: it first lets no new connection begin and takes those that have begun.
    """

    timeout_seconds: float
    leave_port: bool = False


@dataclass(frozen=True)
class ControlConfig:
    """Launcher to control, once, with the board."""

    socket_path: str
    log_format: str
    log_level: str
    metrics_host: str = ""
    metrics_port: int | None = None


@dataclass(frozen=True)
class SegmentState:
    """One segment in a `ServerState`."""

    unit: str
    total_bytes: int
    digest: str
    dtype: str
    verdict: str
    explanation: str
    seconds: float
    pages: tuple[tuple[int, int], ...]
    memory_nodes: tuple[int, ...] = ()
    data_offset: int = 0
    mbind_errno: int = 0
    files: tuple[tuple[str, int, int, int, int], ...] = ()


@dataclass(frozen=True)
class WorkerPlace:
    """One worker's place in a `ServerState`; `pid` is 0 and `row` -1 while nobody fills it.

    `drained` places stay empty on purpose. `generation` counts the weights that the server has loaded.
    """

    index: int
    unit: str
    pid: int
    serving: bool
    cpus: tuple[int, ...]
    kv_cache_bytes: int
    restarts: int
    address: str
    memory_nodes: tuple[int, ...] = ()
    mbind_errno: int = 0
    tcp_address: str = ""
    row: int = -1
    generation: int = 0
    drained: bool = False


@dataclass(frozen=True)
class ServerState:
    """Launcher to control, whenever something changed: what the launcher alone knows. `started_at` is CLOCK_MONOTONIC.

    `workers` and `helper_pids` are of all generations that live, the serving one first; `segments` are the serving one's.
    `change` is the change under way and `change_phase` how far it is, both empty at rest; `last_error` is why the last
    one failed, empty when it did not.
    """

    state: str
    model: str
    address: str
    version: str
    launcher_pid: int
    started_at: float
    placement_policy: str
    placement_reason: str
    helper_pids: tuple[int, ...]
    segments: tuple[SegmentState, ...] = field(default_factory=tuple)
    workers: tuple[WorkerPlace, ...] = field(default_factory=tuple)
    generation: int = 0
    model_dir: str = ""
    change: str = ""
    change_phase: str = ""
    last_error: str = ""


Message = (
    ZygoteConfig
    | ZygoteReady
    | ForkLoader
    | ForkZygote
    | AttachSegment
    | SegmentAttached
    | ForkWorker
    | Forked
    | ChildExited
    | LoadProgress
    | SegmentBuilt
    | Failed
    | WorkerServing
    | TrialPassed
    | StartServing
    | DrainWorker
    | ControlConfig
    | ServerState
    | ReloadOrder
    | ScaleOrder
    | DrainOrder
    | OrderDone
    | PlanOrder
    | Planned
    | PlanRefused
)
_TYPES = {kind.__name__: kind for kind in Message.__args__}


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value


def _decode(data: bytes) -> Message:
    fields = json.loads(data)
    kind = _TYPES[fields.pop("type")]
    values = {name: _as_tuples(value) for name, value in fields.items()}
    if kind is ServerState:
        values["segments"] = tuple(SegmentState(**_tupled(entry)) for entry in fields["segments"])
        values["workers"] = tuple(WorkerPlace(**_tupled(entry)) for entry in fields["workers"])
    return kind(**values)


def _tupled(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: _as_tuples(value) for name, value in entry.items()}


class Channel:
    """One end of a pair. A message is sent whole or not at all; `receive` returns None at end-of-file."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two connected ends; neither is inherited over exec unless passed on purpose."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        return cls(ends[0]), cls(ends[1])

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        """The end behind an inherited or received descriptor."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send one message. Raises BrokenPipeError or ConnectionResetError when the other end is gone."""
        data = json.dumps({"type": type(message).__name__, **asdict(message)}).encode()
        ancillary = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        )
        self.socket.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)

    def receive(self) -> tuple[Message, list[int]] | None:
        """The next message and its descriptors, or None when the other end is gone."""
        space = socket.CMSG_SPACE(_MAX_DESCRIPTORS * 4)
        try:
            data, ancillary, _, _ = self.socket.recvmsg(_BUFFER_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return None
        if not data:
            return None
        descriptors = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
        return _decode(data), list(descriptors)

    def close(self) -> None:
        """Close this end; the other sees end-of-file."""
        self.socket.close()


def send_if_open(channel: Channel | None, message: Message, descriptors: Sequence[int] = ()) -> bool:
    """Send, unless the other end is gone: its death is seen elsewhere. Returns whether it was sent."""
    try:
        if channel is not None and channel.fileno() >= 0:
            channel.send(message, descriptors)
            return True
    except (BrokenPipeError, ConnectionResetError):
        pass
    return False
