"""How large packed weights are, and whether the kernels are there, without torch: the launcher asks both.

The layout itself is described in packed.h.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from service.kernels.build import LIBRARY

ABI = 3
FORMATS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "int4": 4}
INTEGER_FORMATS = ("int8", "int4")
# Columns that may share a scale; 0 is all of a row.
GROUPS = (0, 16, 32, 64, 128, 256)

_PANEL_ROWS = 16
_ALIGNMENT = 64
_PAIR_BYTES = {"float32": 128, "bfloat16": 64, "float16": 64, "int8": 32, "int4": 16}
_INT4_PAIRS = 4


def packed_bytes(format: str, rows: int, columns: int, group: int = 0) -> int:
    """Bytes of a weight [rows, columns] once packed; `group` columns share a scale (0: all). Raises ValueError."""
    if format not in FORMATS:
        raise ValueError(f"format: {format!r} is unknown; known are {', '.join(FORMATS)}")
    if group not in GROUPS:
        raise ValueError(f"group: must be one of {', '.join(map(str, GROUPS))}, not {group}")
    panels, pairs = -(-rows // _PANEL_ROWS), -(-columns // 2)
    together = _INT4_PAIRS if format == "int4" else 1
    size = panels * -(-pairs // together) * together * _PAIR_BYTES[format]
    if format not in INTEGER_FORMATS:
        return _aligned(size)
    groups = -(-pairs // (group // 2)) if group else 1
    scales = panels * groups * _PANEL_ROWS
    return _aligned(size) + 4 * scales + (scales if format == "int4" else 0)


def expert_stride(format: str, rows: int, columns: int, group: int = 0) -> int:
    """Bytes from one expert's packed weight to the next."""
    return _aligned(packed_bytes(format, rows, columns, group))


@cache
def why_unusable(path: Path = LIBRARY) -> str | None:
    """Why the native kernels cannot be used here, in a sentence; None where they can."""
    if not path.exists():
        return "native CPU kernels were not built (python -m service.kernels.build)"
    try:
        abi = ctypes.CDLL(str(path)).numaserve_abi()
    except (OSError, AttributeError) as error:
        return f"native CPU kernels cannot be loaded: {error}"
    if abi != ABI:
        return f"{path} was built from other sources: run python -m service.kernels.build"
    return None


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
