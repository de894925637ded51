"""The preforked parent of one unit: pinned, everything imported, weights mapped. It only forks, and reaps.

It never runs a parallel operation, never starts gRPC and never has a second thread: forked children of a process with
threads inherit locks that nobody will release (POSIX fork(3p)). It starts as `python -m placement.zygote FD`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

from placement.binding import bind_process
from placement.board import Board
from placement.file_segment import AnySegment, open_segment
from placement.logs import configure_logging
from placement.messages import (
    AttachSegment,
    Channel,
    ChildExited,
    Forked,
    ForkLoader,
    ForkWorker,
    ForkZygote,
    Message,
    SegmentAttached,
    ZygoteConfig,
    ZygoteReady,
)

log = logging.getLogger("numaserve.zygote")

_PR_SET_PDEATHSIG = 1


def resolve(entry: str) -> Callable[..., Any]:
    """The function that "package.module:function" names."""
    module, _, function = entry.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def count_threads() -> int:
    """Threads of this process."""
    return len(os.listdir("/proc/self/task"))


def _return_free_heap() -> None:
    """Give what loading left free in the C heap back to the kernel, where the C library can (malloc_trim(3) is glibc's)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class ForkedSuccessor(Exception):
    """Raised in a forked child that is to be the next zygote: it leaves the loop of its parent behind."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self.channel = channel


class Zygote:
    """The loop of one zygote."""

    def __init__(self, channel: Channel, config: ZygoteConfig) -> None:
        self._channel = channel
        self._config = config
        self._segment: AnySegment | None = None
        self._prepared: Any = None
        self._wakeup_read, self._wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        """Serve the launcher until it closes the channel. Raises ForkedSuccessor in the child that ForkZygote asks for."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        bindings = bind_process(self._config.cpus, self._config.memory_nodes, self._config.strict_memory)
        # Importing makes no garbage to speak of, and looking for it takes a tenth of the time.
        gc.disable()
        for module in self._config.preload:
            importlib.import_module(module)
        gc.enable()
        self._channel.send(ZygoteReady(os.getpid(), tuple(map(str, bindings))))
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        poll.register(self._wakeup_read, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._wakeup_read in ready:
                os.read(self._wakeup_read, 512)
                self._reap()
            if self._channel.fileno() in ready:
                received = self._channel.receive()
                if received is None:
                    return
                self._handle(*received)

    def _handle(self, message: Message, descriptors: list[int]) -> None:
        match message:
            case ForkLoader():
                child_channel = Channel.from_fd(descriptors[0])
                entry = resolve(self._config.loader_entry)
                self._fork(-1, child_channel, lambda: entry(child_channel, self._config))
            case AttachSegment():
                self._attach(message, descriptors[0])
            case ForkWorker():
                child_channel, board_fd = Channel.from_fd(descriptors[0]), descriptors[1]
                entry = resolve(self._config.worker_entry)
                self._fork(
                    message.index,
                    child_channel,
                    lambda: entry(self._prepared, message, child_channel, Board(board_fd)),
                )
                os.close(board_fd)
            case ForkZygote():
                self._fork_successor(Channel.from_fd(descriptors[0]))
            case _:
                raise TypeError(f"zygote cannot handle {message!r}")

    def _attach(self, message: AttachSegment, fd: int) -> None:
        try:
            segment = open_segment(fd)
            os.close(fd)
            self._segment = segment
            self._prepared = resolve(self._config.prepare_entry)(segment, self._config, message.verdict)
        except (ValueError, OSError) as error:
            self._channel.send(SegmentAttached(error=str(error)))
            return
        except Exception as error:
            log.exception("cannot prepare to serve")
            self._channel.send(SegmentAttached(error=f"{type(error).__name__}: {error}"))
            return
        # What exists now never dies: frozen objects are not visited by the collector, so children do not copy their pages.
        gc.collect()
        _return_free_heap()
        gc.freeze()
        self._channel.send(SegmentAttached())

    def _fork(self, index: int, child_channel: Channel, run: Callable[[], None]) -> None:
        threads = count_threads()
        if threads != 1:
            child_channel.close()
            self._channel.send(Forked(index, 0, f"the zygote has {threads} threads, so it must not fork"))
            return
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._become_child(index, run)
        child_channel.close()
        self._channel.send(Forked(index, pid))

    def _fork_successor(self, channel: Channel) -> None:
        threads = count_threads()
        if threads != 1:
            channel.close()
            self._channel.send(Forked(-2, 0, f"the zygote has {threads} threads, so it must not fork"))
            return
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._leave_parent_behind()
            os.setsid()
            self._let_go_of_weights()
            raise ForkedSuccessor(channel)
        channel.close()
        self._channel.send(Forked(-2, pid))

    def _leave_parent_behind(self) -> None:
        signal.set_wakeup_fd(-1)
        os.close(self._wakeup_read)
        os.close(self._wakeup_write)
        self._channel.close()

    def _let_go_of_weights(self) -> None:
        # Frozen objects are not visited, so that cycles among them would keep the tokenizer and all else.
        gc.unfreeze()
        self._prepared = None
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        gc.collect()
        _return_free_heap()

    def _become_child(self, index: int, run: Callable[[], None]) -> None:
        status = 1
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._leave_parent_behind()
            if index == -1:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            run()
            status = 0
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:
            log.exception("%s ends on an unexpected error", "loader" if index == -1 else f"worker {index}")
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._channel.send(ChildExited(pid, status))


def main() -> None:
    """Entry point: the channel's descriptor is the only argument."""
    channel: Channel | None = Channel.from_fd(int(sys.argv[1]))
    while channel is not None:
        channel = _serve(channel)
    sys.stdout.flush()
    sys.stderr.flush()
    # Leaving without tearing down torch: the kernel frees everything at once.
    os._exit(0)


def _serve(channel: Channel) -> Channel | None:
    """Be one zygote to its end; returns the channel of the next in the forked child that is to be it."""
    os.set_inheritable(channel.fileno(), False)
    try:
        received = channel.receive()
        if received is None:
            return None
        config = received[0]
        assert isinstance(config, ZygoteConfig)
        configure_logging(f"zygote {config.unit}", config.log_format, config.log_level)
        Zygote(channel, config).run()
    except ForkedSuccessor as successor:
        return successor.channel
    except (BrokenPipeError, ConnectionResetError):
        log.info("the launcher is gone")
    return None


if __name__ == "__main__":
    main()
