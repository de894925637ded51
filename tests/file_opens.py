"""Counts how often a file is opened, by whatever process. Source: inotify(7)."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from types import TracebackType

_IN_OPEN = 0x20
_EVENT = struct.Struct("iIII")


class FileOpens:
    """Counts opens of one file while it is entered."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._libc = ctypes.CDLL(None, use_errno=True)

    def __enter__(self) -> FileOpens:
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        watch = self._libc.inotify_add_watch(self._fd, os.fsencode(self._path), _IN_OPEN)
        assert watch >= 0, os.strerror(ctypes.get_errno())
        return self

    def count(self) -> int:
        """Opens since the last call."""
        found = 0
        try:
            while data := os.read(self._fd, 1 << 16):
                at = 0
                while at < len(data):
                    _, mask, _, length = _EVENT.unpack_from(data, at)
                    found += bool(mask & _IN_OPEN)
                    at += _EVENT.size + length
        except BlockingIOError:
            pass
        return found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
