"""A sealed segment: self-describing, refused when damaged, and beyond anybody's reach to change."""

import faulthandler
import fcntl
import mmap
import os
import signal
import struct

import pytest

from placement.mapping import HUGE_PAGE, Mapping
from placement.segment import VERSION, Segment, SegmentBuilder, SegmentError, TensorSpec


def build(values: dict[str, bytes], digest: str = "d1") -> int:
    specs = [TensorSpec(name, "uint8", (len(data),), len(data)) for name, data in values.items()]
    builder = SegmentBuilder("node0", "plain", "uint8", specs)
    for name, view in builder.destinations().items():
        view[:] = values[name]
    return builder.seal(digest)


def raw_memfd(data: bytes, seals: int = 0) -> int:
    fd = os.memfd_create("raw", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_what_was_written_is_what_every_reader_sees() -> None:
    values = {"odd": b"\x01\x02\x03", "empty": b"", "large": bytes(range(256)) * 4096}
    segment = Segment(build(values, digest="abc"))
    assert {name: bytes(view) for name, view in segment.views().items()} == values
    assert segment.manifest.digest == "abc"
    assert segment.manifest.unit == "node0"
    assert segment.parameters == sum(map(len, values.values()))


def test_tensors_are_aligned_and_the_data_can_take_huge_pages() -> None:
    segment = Segment(build({"a": b"x" * 65, "b": b"y" * 100}))
    assert all((segment.mapping.address + entry.offset) % 64 == 0 for entry in segment.manifest.tensors)
    assert segment.data_offset % HUGE_PAGE == 0
    assert segment.mapping.address % HUGE_PAGE == 0


@pytest.mark.parametrize("reopen", [False, True], ids=["handed-out descriptor", "reopened for writing"])
def test_no_writable_mapping_can_be_made(reopen: bool) -> None:
    fd = build({"a": b"x" * 100})
    if reopen:
        fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        Mapping.of_file(fd, 4096, writable=True)
    with pytest.raises(OSError, match=r"Bad file descriptor|not permitted"):
        os.pwrite(fd, b"z", HUGE_PAGE)
    with pytest.raises(OSError, match=r"Invalid argument|not permitted"):
        os.ftruncate(fd, 0)


def test_a_store_through_a_view_ends_that_process_alone() -> None:
    segment = Segment(build({"a": b"x" * 100}))
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        segment.views()["a"][0] = 0
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGSEGV
    assert bytes(segment.views()["a"]) == b"x" * 100


def test_a_segment_outlives_the_process_that_made_it() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        fd = build({"a": b"made by the child"})
        os.write(writer, str(fd).encode())
        signal.pause()
    fd = os.open(f"/proc/{child}/fd/{int(os.read(reader, 16))}", os.O_RDONLY)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert bytes(Segment(fd).views()["a"]) == b"made by the child"


def test_sealing_waits_for_nobody_else_to_hold_a_writable_mapping() -> None:
    builder = SegmentBuilder("node0", "plain", "uint8", [TensorSpec("a", "uint8", (8,), 8)])
    other = Mapping.of_file(builder._fd, 4096, writable=True)
    with pytest.raises(OSError, match="busy"):
        builder.seal("d")
    other.close()


def test_many_tensors_with_long_names_fit() -> None:
    values = {f"model.layers.{layer}.{'very_long_name_' * 8}": bytes([layer % 256]) for layer in range(5000)}
    segment = Segment(build(values))
    assert len(segment.manifest.tensors) == 5000


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: raw_memfd(b""), "does not hold a numaserve segment"),
        (lambda: raw_memfd(b"<html>" + b" " * 200), "does not hold a numaserve segment"),
        (lambda: raw_memfd(b"NUMASEG\x00" + struct.pack("<I", VERSION + 1) + b"\0" * 60), "has version 2"),
        (lambda: raw_memfd(b"NUMASEG\x00" + struct.pack("<I", VERSION) + b"\0" * 60), "not sealed"),
    ],
)
def test_other_files_are_refused(make, problem: str) -> None:
    with pytest.raises(SegmentError, match=problem):
        Segment(make())


def copy_with(fd: int, offset: int, data: bytes) -> int:
    contents = bytearray(os.pread(fd, os.fstat(fd).st_size, 0))
    contents[offset : offset + len(data)] = data
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    return raw_memfd(bytes(contents), seals)


def test_a_damaged_manifest_is_refused() -> None:
    with pytest.raises(SegmentError, match="its hash differs"):
        Segment(copy_with(build({"a": b"x"}), 100, b"\xff"))


def test_a_segment_of_another_length_is_refused() -> None:
    fd = build({"a": b"x"})
    longer = os.pread(fd, os.fstat(fd).st_size, 0) + b"\0" * mmap.PAGESIZE
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    with pytest.raises(SegmentError, match="its header says"):
        Segment(raw_memfd(longer, seals))
