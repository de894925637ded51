"""A table of weights in files: self-describing, sealed, and refused once a file is not what it was."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from test_segment import raw_memfd

from placement.file_segment import (
    FileManifest,
    FilePart,
    FileSegment,
    FileTensor,
    WeightsFile,
    open_segment,
)
from placement.segment import ALL_SEALS, Segment, SegmentBuilder, SegmentError, TensorSpec

PAGE = 4096


def identity(path: Path) -> WeightsFile:
    fd = os.open(path, os.O_RDONLY)
    try:
        return WeightsFile.of(path, fd)
    finally:
        os.close(fd)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    paths[0].write_bytes(b"head" + b"x" * 2 * PAGE)
    paths[1].write_bytes(b"y" * PAGE)
    return paths


@pytest.fixture
def manifest(files: list[Path]) -> FileManifest:
    tensors = (
        FileTensor("joined", "uint8", (2, 6), (FilePart(0, 4, 6), FilePart(1, 0, 6))),
        FileTensor("alone", "uint8", (3,), (FilePart(1, 6, 3),)),
    )
    return FileManifest("node0", "uint8", "digest", tuple(map(identity, files)), tensors)


def test_every_reader_sees_the_files_bytes(manifest: FileManifest) -> None:
    segment = open_segment(manifest.seal())
    assert isinstance(segment, FileSegment)
    segment.populate()
    assert segment.manifest == manifest
    assert {name: [bytes(part) for part in parts] for name, parts in segment.views().items()} == {
        "joined": [b"x" * 6, b"y" * 6],
        "alone": [b"yyy"],
    }
    assert (segment.parameters, segment.length) == (15, 3 * PAGE + 4)


def test_a_segment_with_weights_of_its_own_is_told_apart() -> None:
    builder = SegmentBuilder("node0", "plain", "uint8", [TensorSpec("t", "uint8", (1,), 1)])
    builder.destinations()["t"][:] = b"z"
    assert isinstance(open_segment(builder.seal("d")), Segment)


def test_a_link_is_known_by_the_file_that_it_leads_to(files: list[Path], tmp_path: Path) -> None:
    link = tmp_path / "link.safetensors"
    link.symlink_to(files[0])
    assert identity(link) == identity(files[0])


def replace_file(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.rename(path)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda path: path.unlink(), "cannot be found any more"),
        (replace_file, "another file has taken its place"),
        (
            lambda path: os.truncate(path, PAGE),
            f"was {2 * PAGE + 4} bytes long when it was loaded, is {PAGE}",
        ),
        (lambda path: os.utime(path, ns=(1, 1)), "was written to since it was loaded"),
    ],
    ids=["removed", "replaced", "cut", "written"],
)
def test_a_file_that_is_not_what_it_was_is_refused(
    files: list[Path], manifest: FileManifest, act: Callable[[Path], None], words: str
) -> None:
    before = open_segment(manifest.seal())
    before.check()
    act(files[0])
    with pytest.raises(SegmentError, match=f"a.safetensors: {words}"):
        before.check()
    expected = "cannot be opened" if words.startswith("cannot") else words
    with pytest.raises(SegmentError, match=f"a.safetensors: {expected}"):
        open_segment(manifest.seal())


def test_a_store_into_a_weight_ends_its_process_and_leaves_the_file(
    files: list[Path], manifest: FileManifest
) -> None:
    segment = open_segment(manifest.seal())
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.close(2)
        segment.views()["alone"][0][0] = 1
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    assert set(files[1].read_bytes()) == set(b"y")


def test_damaged_or_foreign_descriptors_are_refused(manifest: FileManifest) -> None:
    fd = manifest.seal()
    good = os.pread(fd, os.fstat(fd).st_size, 0)
    for data, seals, words in [
        (good[:-1] + b"!", ALL_SEALS, "its hash differs"),
        (good, 0, "not sealed"),
        (good[:8] + b"\x09" + good[9:], ALL_SEALS, "version 9"),
        (b"anything", ALL_SEALS, "does not hold"),
    ]:
        with pytest.raises(SegmentError, match=words):
            FileManifest.read(raw_memfd(data, seals))
    with pytest.raises(SegmentError, match="no-such-file: cannot be opened"):
        open_segment(replace(manifest, files=(WeightsFile("/no-such-file", 1, 1, 1, 1),)).seal())


def test_a_segment_that_is_closed_maps_nothing(files: list[Path], manifest: FileManifest) -> None:
    builder = SegmentBuilder("closing0", "plain", "uint8", [TensorSpec("t", "uint8", (1,), 1)])
    builder.destinations()["t"][:] = b"z"
    for fd, name in ((manifest.seal(), str(files[0])), (builder.seal("d"), "closing0")):
        segment = open_segment(fd)
        os.close(fd)
        assert name in Path("/proc/self/maps").read_text()
        segment.close()
        assert name not in Path("/proc/self/maps").read_text()
