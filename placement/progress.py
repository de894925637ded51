"""What `serve` shows while it loads: one bar on a terminal, a log line every tenth of the way elsewhere."""

from __future__ import annotations

import logging
import sys
import time

log = logging.getLogger("numaserve.launcher")

_BAR_WIDTH = 30
_REDRAW_SECONDS = 0.1


class LoadProgressView:
    """Bytes filled over all units that load at once."""

    def __init__(self) -> None:
        self._units: dict[str, tuple[int, int]] = {}
        self._started: float | None = None
        self._drawn_at = 0.0
        self._logged_tenth = 0
        self._terminal = sys.stderr.isatty()

    def update(self, unit: str, done_bytes: int, total_bytes: int) -> None:
        """Note how far one unit is."""
        if self._started is None:
            self._started = time.monotonic()
        self._units[unit] = (done_bytes, total_bytes)
        done = sum(pair[0] for pair in self._units.values())
        total = sum(pair[1] for pair in self._units.values())
        if total == 0:
            return
        rate = done / max(time.monotonic() - self._started, 1e-6)
        if self._terminal:
            self._draw(done, total, rate)
        elif done * 10 // total > self._logged_tenth:
            self._logged_tenth = done * 10 // total
            log.info("loading: %d %% of %.2f GB, %.2f GB/s", done * 100 // total, total / 1e9, rate / 1e9)

    def _draw(self, done: int, total: int, rate: float) -> None:
        now = time.monotonic()
        if now - self._drawn_at < _REDRAW_SECONDS and done < total:
            return
        self._drawn_at = now
        filled = _BAR_WIDTH * done // total
        bar = "█" * filled + "░" * (_BAR_WIDTH - filled)
        sys.stderr.write(f"\rloading {bar} {done / 1e9:.2f}/{total / 1e9:.2f} GB  {rate / 1e9:.2f} GB/s ")
        sys.stderr.flush()

    def finish(self) -> None:
        """Leave the terminal's line."""
        if self._terminal and self._drawn_at:
            sys.stderr.write("\n")
            sys.stderr.flush()
            self._drawn_at = 0.0
