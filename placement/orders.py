"""What is asked of a running server: orders that the control process passes on, and the plans that they lead to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReloadOrder:
    """Load weights anew and serve from them. `model_dir` is a folder or a hub name, empty for the one served now."""

    number: int
    model_dir: str = ""


@dataclass(frozen=True)
class ScaleOrder:
    """Serve with so many workers in all."""

    number: int
    workers: int


@dataclass(frozen=True)
class DrainOrder:
    """Let these workers finish and keep their places empty; `undo` fills them again.

    Workers are named by number, or all those of a node by its id; -1 stands for none given.
    """

    number: int
    worker: int = -1
    node: int = -1
    undo: bool = False


@dataclass(frozen=True)
class OrderDone:
    """Launcher to control: what became of order `number`. `code` is the name of a gRPC status code, empty for success.

    `field` is the request's field that is at fault, where one is. `generation` is the one that serves now.
    """

    number: int
    code: str = ""
    field: str = ""
    message: str = ""
    generation: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanOrder:
    """Launcher to planner, once: plan the next generation. Strings that are JSON are the planning function's own.

    `model_dir` and `workers` are as in the orders, empty and 0 for no change; `policy` is the one to keep, empty to
    choose anew. `kept_bytes` are (node, bytes) of segments that stay, `freed_bytes` of those that go in the end;
    `processes` are (pid, memory nodes) of the processes that go in the end.
    """

    entry: str
    plan_request: str
    service_config: str
    model_dir: str = ""
    workers: int = 0
    policy: str = ""
    kept_bytes: tuple[tuple[int, int], ...] = ()
    freed_bytes: tuple[tuple[int, int], ...] = ()
    processes: tuple[tuple[int, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class Planned:
    """Planner to launcher: what the next generation is to be. `plan` is JSON as of placement.plan_codec."""

    plan: str
    service_config: str
    model_dir: str
    model_files: str = ""


@dataclass(frozen=True)
class PlanRefused:
    """Planner to launcher: why it cannot be; the fields are those of OrderDone."""

    code: str
    field: str
    message: str
