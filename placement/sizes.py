"""Numbers of bytes in words."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(text: str) -> int:
    """Bytes in `512MiB`, `2G` (powers of two), `500MB` (power of ten) or `1048576`. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match:
        unit = match[2].upper()
        factor = _DECIMAL.get(unit) or _UNITS.get(unit[:-2] if unit.endswith("IB") else unit)
        if factor:
            return int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    raise ValueError(f"cannot read the size {text!r}; expected a number with a unit, such as 512MiB or 2G")


def format_bytes(count: int) -> str:
    """A number of bytes as an operator reads it: `1.5 GiB`, `512 MiB`, `12 KiB`, `7 B`."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(count) >= unit:
            value = count / unit
            return f"{value:.0f} {name}" if value >= 100 or value == int(value) else f"{value:.1f} {name}"
    return f"{count} B"
