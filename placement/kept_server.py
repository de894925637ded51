"""What a server leaves to its successor, so that nobody reads the checkpoint again: a JSON document beside descriptors.

The successor may be another version of the program: the document has a format number of its own.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from placement.file_segment import open_segment
from placement.generation import Generation
from placement.messages import SegmentBuilt
from placement.segment import SegmentError
from placement.unit import KeptSegment

FORMAT = 1


class NotUsable(ValueError):
    """What was left cannot be used here; the message says why."""


@dataclass(frozen=True)
class SegmentNote:
    """One segment, whose descriptor travels beside the document."""

    unit: str
    memory_nodes: tuple[int, ...]
    built: SegmentBuilt


@dataclass(frozen=True)
class KeptServer:
    """One server at rest. Descriptors of the segments are kept beside it, in the order of `segments`.

    `model_files` is JSON of the service's own that tells one state of the checkpoint's files from another. `processes`
    are (pid, memory nodes) of the processes that go when the successor serves.
    """

    version: str
    generation: int
    model_dir: str
    model_files: str
    policy: str
    address: str
    segments: tuple[SegmentNote, ...]
    processes: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, generation: Generation, version: str, address: str) -> KeptServer:
        """The server whose serving generation this is."""
        blueprint = generation.blueprint
        return cls(
            version,
            generation.number,
            blueprint.model_dir,
            blueprint.model_files,
            blueprint.plan.policy.value,
            address,
            tuple(
                SegmentNote(unit.plan.name, unit.plan.memory_nodes, unit.segment.built)
                for unit in generation.units
                if unit.segment is not None
            ),
            tuple((pid, unit.plan.memory_nodes) for unit in generation.units for pid in unit.pids),
        )

    def to_json(self) -> str:
        """For the successor."""
        return json.dumps({"format": FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> KeptServer:
        """Inverse of `to_json`. Raises NotUsable for a document of another format or none at all."""
        try:
            fields = json.loads(text)
            found = fields.pop("format")
            if found != FORMAT:
                raise NotUsable(
                    f"version {fields.get('version')} leaves format {found}, this program knows format {FORMAT}"
                )
            segments = tuple(
                SegmentNote(note["unit"], tuple(note["memory_nodes"]), _built(note["built"]))
                for note in fields.pop("segments")
            )
            processes = tuple((pid, tuple(nodes)) for pid, nodes in fields.pop("processes"))
            return cls(segments=segments, processes=processes, **fields)
        except NotUsable:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise NotUsable(f"what the server left is damaged: {error!r}") from error


def _built(fields: dict) -> SegmentBuilt:
    pages = tuple((node, count) for node, count in fields.pop("pages"))
    files = tuple(tuple(file) for file in fields.pop("files"))
    return SegmentBuilt(pages=pages, steps=tuple(fields.pop("steps")), files=files, **fields)


@dataclass
class Inheritance:
    """What a starting server has got of one before it. Descriptors belong to whoever holds this.

    `connection` leads to the server that still serves, None when it is gone. `lock` is the descriptor of its runtime
    folder's lock, -1 when there is none; `port_holder` holds the port, None when it must be reserved anew.
    """

    kept: KeptServer
    descriptors: list[int]
    port_holder: socket.socket | None = None
    lock: int = -1
    connection: socket.socket | None = None

    def check_segments(self) -> None:
        """Raises NotUsable unless every descriptor holds a sealed segment with the digest that was told."""
        if len(self.descriptors) != len(self.kept.segments):
            raise NotUsable(
                f"{len(self.kept.segments)} segments were left, but {len(self.descriptors)} descriptors"
            )
        for note, descriptor in zip(self.kept.segments, self.descriptors, strict=True):
            try:
                segment = open_segment(descriptor)
            except (SegmentError, OSError) as error:
                raise NotUsable(f"segment {note.unit}: {error}") from error
            segment.close()
            if segment.manifest.digest != note.built.digest:
                raise NotUsable(f"segment {note.unit} holds other weights than the server told")

    def segments(self) -> Mapping[str, KeptSegment]:
        """By unit name."""
        return {
            note.unit: KeptSegment(note.built, descriptor)
            for note, descriptor in zip(self.kept.segments, self.descriptors, strict=True)
        }
