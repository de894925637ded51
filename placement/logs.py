"""Log lines of every process: plain text for people, JSON for collectors, always on standard error."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback


class _PlainFormatter(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d %(levelname)-7s {role}: %(message)s", "%H:%M:%S")


class _JsonFormatter(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        milliseconds = int(record.msecs)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{milliseconds:03d}Z",
            "level": record.levelname.lower(),
            "role": self._role,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line)


def configure_logging(role: str, log_format: str, level: str) -> None:
    """Send this process's log lines to standard error. `log_format` is "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(role) if log_format == "json" else _PlainFormatter(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
