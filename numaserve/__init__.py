"""What other services import: the generated stubs (`numaserve.v1`) and a thin client.

    with numaserve.Client("localhost:50051") as client:
        print(client.infer(prompt="Once upon a time", max_tokens=32).text)

`numaserve.AsyncClient` is the same for asyncio.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numaserve.aio import AsyncClient
    from numaserve.client import Client
    from numaserve.errors import FieldViolation, InferenceError

__all__ = ["AsyncClient", "Client", "FieldViolation", "InferenceError"]


_HOMES = {
    "AsyncClient": "numaserve.aio",
    "Client": "numaserve.client",
    "FieldViolation": "numaserve.errors",
    "InferenceError": "numaserve.errors",
}


def __getattr__(name: str) -> object:
    # Imported on first use, so that the stubs and the command line start without what they do not need.
    if name == "aio":
        return importlib.import_module("numaserve.aio")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
