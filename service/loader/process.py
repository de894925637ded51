"""The loader: a short-lived child of the zygote that creates, fills, judges and seals one unit's segment.

Threads and parallel operations are fine here, because this process never forks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from placement.binding import Binding, bind_mapping
from placement.messages import Channel, Failed, LoadProgress, SegmentBuilt, ZygoteConfig
from placement.plan import Policy
from placement.residency import Verdict, judge, pages_per_node
from placement.segment import SegmentBuilder, SegmentError, TensorSpec
from service.backends import lay_out_for, layout_of
from service.config import ServiceConfig
from service.loader.checkpoint import CheckpointError, open_checkpoint
from service.loader.file_weights import SharedFiles, share_files
from service.loader.fill import fill
from service.models.config import ConfigError, parse_config
from service.models.weights import WeightPlan, plan_weights

log = logging.getLogger("numaserve.loader")

_REPORT_SECONDS = 0.1


class _Reporter:
    """Adds up filled bytes from several threads and tells the launcher now and then."""

    def __init__(self, channel: Channel, total_bytes: int) -> None:
        self._channel = channel
        self._total = total_bytes
        self._done = 0
        self._sent_at = 0.0

    def __call__(self, added_bytes: int) -> None:
        self._done += added_bytes
        now = time.monotonic()
        if now - self._sent_at >= _REPORT_SECONDS or self._done >= self._total:
            self._sent_at = now
            self._channel.send(LoadProgress(self._done, self._total))


def _prefer_as_oom_victim() -> None:
    # A bound node that fills up wakes the OOM killer; it must take the loader, which can be started again.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def build_segment(
    unit: str,
    memory_nodes: tuple[int, ...],
    policy: Policy,
    layout: str,
    plan: WeightPlan,
    fill_destinations: Callable[[SegmentBuilder], str],
) -> tuple[int, str, Verdict, Binding, SegmentBuilder, tuple[tuple[int, int], ...]]:
    """Create, bind, fill, judge and seal: (descriptor, digest, verdict, outcome of mbind, builder, pages per node)."""
    specs = [
        TensorSpec(each.name, each.dtype, each.shape, each.nbytes, each.packing, each.group)
        for each in plan.tensors
    ]
    builder = SegmentBuilder(unit, layout, plan.dtype, specs)
    binding = bind_mapping(builder.mapping, memory_nodes, policy)
    digest = fill_destinations(builder)
    residency = pages_per_node(builder.mapping.address + builder.data_offset, builder.data_length)
    refused = [binding.refused] if binding.refused is not None else []
    verdict = judge(residency, memory_nodes, refused, interleaved=policy is Policy.INTERLEAVE)
    return builder.seal(digest), digest, verdict, binding, builder, tuple(residency.pages.items())


def run(channel: Channel, config: ZygoteConfig) -> None:
    """Entry point in the forked child. Exits with 2 when the model is at fault."""
    started = time.monotonic()
    service = ServiceConfig.from_json(config.service_config)
    _prefer_as_oom_victim()
    try:
        checkpoint = open_checkpoint(Path(service.model_dir))
        model = parse_config(checkpoint.config, checkpoint.generation_config)
        plan = lay_out_for(
            service.backend, plan_weights(model, checkpoint, service.dtype), service.quantization
        )
        total = sum(tensor.nbytes for tensor in plan.tensors)
        reporter = _Reporter(channel, total)
        if Policy(config.policy) is Policy.SHARED:
            shared = share_files(config.unit, config.memory_nodes, plan, len(config.cpus), reporter)
            _report_shared(channel, shared, plan.dtype, started)
            return
        fd, digest, verdict, binding, builder, pages = build_segment(
            config.unit,
            config.memory_nodes,
            Policy(config.policy),
            layout_of(service.backend, service.quantization),
            plan,
            lambda builder: fill(plan, builder.destinations(), len(config.cpus), reporter),
        )
    except (CheckpointError, ConfigError, SegmentError, OSError) as error:
        channel.send(Failed(f"{config.unit}: {error}", permanent=True))
        raise SystemExit(2) from None
    huge = "asked for" if builder.huge_pages_advised else "not available for shared memory here"
    channel.send(
        SegmentBuilt(
            total_bytes=builder.length,
            digest=digest,
            dtype=plan.dtype,
            verdict=verdict.kind.value,
            explanation=verdict.explanation,
            seconds=time.monotonic() - started,
            pages=pages,
            steps=(str(binding), f"huge pages: {huge}"),
            data_offset=builder.data_offset,
            mbind_errno=binding.errno,
        ),
        [fd],
    )
    os.close(fd)


def _report_shared(channel: Channel, shared: SharedFiles, dtype: str, started: float) -> None:
    steps = [f"{len(shared.manifest.files)} files of the checkpoint mapped, nothing copied"]
    if shared.dropped:
        steps.append(f"page cache: {shared.dropped} pages were on other nodes; dropped and read again")
    channel.send(
        SegmentBuilt(
            total_bytes=shared.total_bytes,
            digest=shared.manifest.digest,
            dtype=dtype,
            verdict=shared.verdict.kind.value,
            explanation=shared.verdict.explanation,
            seconds=time.monotonic() - started,
            pages=tuple(shared.residency.pages.items()),
            steps=tuple(steps),
            files=tuple(shared.manifest.files),
        ),
        [shared.fd],
    )
    os.close(shared.fd)
