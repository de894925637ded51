"""A service without a model, for tests of the launcher and the zygote: its worker answers its pid on a unix socket.

`service_config` is a JSON object: `directory` for the sockets, what should go wrong, and `contents` of the weights. A file
`next` in the directory holds what the next generation is to change of it, and as `counts` the workers of each unit.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from pathlib import Path

from placement.board import Board, WorkerState
from placement.messages import (
    Channel,
    DrainWorker,
    Failed,
    ForkWorker,
    LoadProgress,
    SegmentBuilt,
    StartServing,
    TrialPassed,
    WorkerServing,
    ZygoteConfig,
)
from placement.orders import Planned, PlanOrder, PlanRefused
from placement.plan import Plan, Policy, UnitPlan, WorkerPlan
from placement.plan_codec import plan_to_json
from placement.segment import Segment, SegmentBuilder, TensorSpec

CONTENTS = b"weights of the toy"


def load(channel: Channel, config: ZygoteConfig) -> None:
    options = json.loads(config.service_config)
    directory = Path(options["directory"])
    with (directory / "loads").open("a") as log:
        log.write(f"{os.getpid()}\n")
    if options.get("loader") == "fails":
        channel.send(Failed("the model is no good", permanent=True))
        raise SystemExit(2)
    if options.get("loader") == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if options.get("loader") == "is killed once" and not (directory / "killed").exists():
        (directory / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    builder = SegmentBuilder(
        config.unit, "toy", "uint8", [TensorSpec("t", "uint8", (len(CONTENTS),), len(CONTENTS))]
    )
    contents = options.get("contents", "").encode() or CONTENTS
    builder.destinations()["t"][: len(contents)] = contents
    channel.send(LoadProgress(len(CONTENTS), len(CONTENTS)))
    fd = builder.seal("toy digest")
    channel.send(
        SegmentBuilt(
            builder.length, "toy digest", "uint8", "bound", "all pages", 0.1, ((0, 1),), ("a step",)
        ),
        [fd],
    )


def prepare(segment: Segment, config: ZygoteConfig, verdict: str) -> tuple[Segment, ZygoteConfig]:
    options = json.loads(config.service_config)
    if options.get("prepare") == "fails":
        raise ValueError("the tokenizer is no good")
    if options.get("prepare") == "starts a thread":
        import threading

        threading.Thread(target=threading.Event().wait, daemon=True).start()
    assert verdict == "bound"
    return segment, config


def work(prepared: tuple[Segment, ZygoteConfig], order: ForkWorker, channel: Channel, board: Board) -> None:
    segment, config = prepared
    options = json.loads(config.service_config)
    if options.get("worker") == "fails":
        channel.send(Failed("the cache is too small", permanent=True))
        raise SystemExit(2)
    if options.get("worker") == "crashes":
        os.abort()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if order.on_trial:
        if options.get("worker") == "fails its trial":
            channel.send(Failed("the answer makes no sense", permanent=True))
            raise SystemExit(2)
        channel.send(TrialPassed(os.getpid()))
        received = channel.receive()
        if received is None or not isinstance(received[0], StartServing):
            raise SystemExit(0)
    path = f"{options['directory']}/toy-{order.index}.sock"
    Path(path).unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    board.set(order.row, "state", WorkerState.SERVING)
    channel.send(WorkerServing(os.getpid(), path))
    while True:
        ready, _, _ = select.select([server, channel], [], [])
        if channel in ready:
            received = channel.receive()
            ignores = options.get("worker") == "ignores drain"
            if received is None or (isinstance(received[0], DrainWorker) and not ignores):
                raise SystemExit(0)
        if server in ready:
            connection, _ = server.accept()
            answer = {
                "pid": os.getpid(),
                "parent": os.getppid(),
                "contents": bytes(segment.views()["t"]).rstrip(b"\0").decode(),
                "generation": config.generation,
                "replaces": order.replaces,
                "cpus": sorted(os.sched_getaffinity(0)),
            }
            connection.sendall(json.dumps(answer).encode())
            connection.close()


def make_plan(counts: list[int]) -> Plan:
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    units, index = [], 0
    for number, count in enumerate(counts):
        name = f"unit{number}"
        workers = tuple(WorkerPlan(index + place, name, cpus[:1], 1, 1 << 20) for place in range(count))
        index += count
        units.append(UnitPlan(name, (0,), (0,), cpus, 1 << 20, workers))
    return Plan(Policy.REPLICATE, "it is a test", tuple(units))


def replan(order: PlanOrder, segments: list[Segment]) -> Planned | PlanRefused:
    options = json.loads(order.service_config)
    changes = json.loads((Path(options["directory"]) / "next").read_text())
    if changes.pop("planner", "") == "crashes":
        os.abort()
    if "refuse" in changes:
        return PlanRefused("RESOURCE_EXHAUSTED", "", changes["refuse"])
    assert bool(segments) == bool(order.policy)
    counts = changes.pop("counts", [])
    plan = make_plan([order.workers] if order.workers else counts)
    return Planned(plan_to_json(plan), json.dumps({**options, **changes}), "")


def control() -> None:
    channel = Channel.from_fd(int(sys.argv[1]))
    while channel.receive() is not None:
        pass


if __name__ == "__main__":
    control()
