"""Whether a starting server may serve the weights that another one left in memory, without a read of the checkpoint."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from placement.file_segment import FileSegment, open_segment
from placement.hand_over import NobodyServes, take_over
from placement.kept_server import Inheritance, NotUsable
from placement.unit import KeptSegment
from service.loader.model_size import ModelSizes, measure_segment

log = logging.getLogger("numaserve.launcher")

_PAGE_BYTES = 4096


def model_files(model_dir: Path) -> str:
    """Sizes and times of the weights' files, as JSON; none is opened."""
    found = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        status = path.stat()
        found[path.name] = [status.st_size, status.st_mtime_ns]
    return json.dumps(found)


def take_over_if_any(runtime_dir: Path, version: str) -> Inheritance | None:
    """What the server of a runtime folder hands over, None where none runs. Raises NotUsable when it refuses."""
    try:
        inheritance = take_over(runtime_dir, version)
    except NobodyServes:
        log.info("--take-over: no server runs in %s; starting afresh", runtime_dir)
        return None
    kept = inheritance.kept
    log.info("taking over from version %s, generation %d, on %s", kept.version, kept.generation, kept.address)
    return inheritance


def adopted_sizes(
    inheritance: Inheritance, model_dir: Path, layout: str, dtype: str, kv_dtype: str, block_size: int
) -> ModelSizes:
    """The sizes of the model in the segments; raises NotUsable, saying why, when they are not what is asked for."""
    kept = inheritance.kept
    inheritance.check_segments()
    if not kept.segments:
        raise NotUsable("no segment was left")
    if Path(kept.model_dir) != model_dir:
        raise NotUsable(f"they are of {kept.model_dir}")
    if changed := _changed_files(kept.model_files, model_files(model_dir)):
        raise NotUsable(f"{', '.join(changed)} changed since they were loaded")
    segment = open_segment(inheritance.descriptors[0])
    try:
        if isinstance(segment, FileSegment):
            raise NotUsable("they are the checkpoint's own files, which a new server maps by itself")
        if segment.manifest.layout != layout:
            raise NotUsable(f"their layout is {segment.manifest.layout}, wanted is {layout}")
        if dtype not in ("auto", segment.manifest.dtype):
            raise NotUsable(f"they are {segment.manifest.dtype}, wanted is {dtype}")
        return measure_segment(model_dir, segment, kv_dtype, block_size)
    finally:
        segment.close()


def _changed_files(then: str, now: str) -> list[str]:
    """Files that are other ones now. One that is gone could not be read anyway."""
    before = json.loads(then or "{}")
    return [name for name, state in json.loads(now).items() if before.get(name) != state]


def bytes_by_node(inheritance: Inheritance) -> Counter[int]:
    """Memory of the segments."""
    sums: Counter[int] = Counter()
    for note in inheritance.kept.segments:
        for node, pages in note.built.pages:
            sums[node] += pages * _PAGE_BYTES
    return sums


def matching_segments(
    inheritance: Inheritance, units: Mapping[str, tuple[int, ...]]
) -> dict[str, KeptSegment]:
    """The segments that lie on the memory nodes of the units that the plan has, by unit name."""
    wanted = {
        note.unit for note in inheritance.kept.segments if units.get(note.unit) == tuple(note.memory_nodes)
    }
    return {unit: segment for unit, segment in inheritance.segments().items() if unit in wanted}
