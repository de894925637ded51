"""What one server leaves to the next: told whole, checked, and refused when it is not what it should be."""

from __future__ import annotations

import json
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from placement.events import EventLoop
from placement.fd_store import Notifier
from placement.hand_over import SERVING, HandOver, NobodyServes, claim, hand_over_socket, take_over
from placement.kept_server import Inheritance, KeptServer, NotUsable, SegmentNote
from placement.messages import SegmentBuilt
from placement.segment import SegmentBuilder, TensorSpec


def make_segment(digest: str = "d") -> int:
    builder = SegmentBuilder("node0", "plain", "uint8", [TensorSpec("t", "uint8", (4,), 4)])
    return builder.seal(digest)


BUILT = SegmentBuilt(8, "d", "uint8", "bound", "all", 0.5, ((0, 3), (1, 4)), ("a step",))
KEPT = KeptServer(
    "1.2",
    7,
    "/models/m",
    "{}",
    "replicate",
    "127.0.0.1:5",
    (SegmentNote("node0", (0,), BUILT),),
    ((12, (0,)),),
)


def test_the_document_comes_back_as_it_was() -> None:
    assert KeptServer.from_json(KEPT.to_json()) == KEPT


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "damaged"),
        ("[]", "damaged"),
        ("{}", "damaged"),
        (json.dumps({"format": 99, "version": "9.9"}), "version 9.9 leaves format 99"),
        (KEPT.to_json().replace('"digest"', '"odd"'), "damaged"),
    ],
)
def test_another_document_is_refused(text: str, words: str) -> None:
    with pytest.raises(NotUsable, match=words):
        KeptServer.from_json(text)


def test_segments_are_looked_into() -> None:
    Inheritance(KEPT, [make_segment()]).check_segments()
    other = os.memfd_create("other")
    for descriptors, words in (
        ([], "1 segments were left, but 0 descriptors"),
        ([make_segment("e")], "holds other weights"),
        ([other], "does not hold a numaserve segment"),
    ):
        with pytest.raises(NotUsable, match=words):
            Inheritance(KEPT, descriptors).check_segments()


class Old:
    """The side that serves, in a thread's stead: its event loop is turned by hand."""

    def __init__(self, runtime: Path) -> None:
        self.events = EventLoop()
        self.told: list[str] = []
        self.done: list[int] = []
        self.refusal = ""
        self.segment = make_segment()
        self.port = socket.socket()
        self.hand_over = HandOver(
            self.events,
            runtime,
            self.offer,
            self.begin,
            lambda: self.told.append("failed"),
            self.done.append,
        )

    def begin(self) -> None:
        if self.refusal:
            raise NotUsable(self.refusal)
        self.told.append("begun")

    def offer(self) -> tuple[KeptServer, list[int]]:
        if self.refusal:
            raise NotUsable(self.refusal)
        return KEPT, [self.port.fileno(), self.port.fileno(), self.segment]

    def turn(self, times: int = 2) -> None:
        for _ in range(times):
            self.events.turn(5)


@pytest.fixture
def old(tmp_path: Path) -> Old:
    return Old(tmp_path)


def ask(runtime: Path, old: Old) -> Inheritance:
    """`take_over`, whose answer is made while it waits."""
    thread = threading.Thread(target=old.turn)
    thread.start()
    try:
        return take_over(runtime, "2.0")
    finally:
        thread.join()


def test_descriptors_and_document_are_handed_over_and_the_end_is_told(tmp_path: Path, old: Old) -> None:
    got = ask(tmp_path, old)
    assert got.kept == KEPT
    got.check_segments()
    assert got.port_holder is not None
    assert os.fstat(got.port_holder.fileno()).st_ino == os.fstat(old.port.fileno()).st_ino
    assert not os.get_inheritable(got.descriptors[0])
    # The old one notices nothing before the new one could serve.
    assert (old.told, old.hand_over.busy) == ([], True)
    assert claimed(got, old) == ""
    assert old.told == ["begun"]
    assert got.connection is not None
    got.connection.send(SERVING)
    old.turn(1)
    assert old.done == [os.getpid()]
    assert old.told == ["begun"]


def claimed(got: Inheritance, old: Old) -> str:
    """What the old one answers to a successor that is ready."""
    assert got.connection is not None
    events, answers = EventLoop(), []
    claim(events, got.connection, answers.append)
    old.turn(1)
    events.turn(5)
    (answer,) = answers
    return answer


def test_what_was_offered_may_serve_no_longer_when_the_successor_is_ready(tmp_path: Path, old: Old) -> None:
    got = ask(tmp_path, old)
    old.refusal = "generation 8 serves by now"
    assert claimed(got, old) == "generation 8 serves by now"
    assert (old.told, old.done, old.hand_over.busy) == ([], [], False)
    old.refusal = ""
    assert ask(tmp_path, old).kept == KEPT


def test_a_server_that_is_gone_leaves_the_way_free(tmp_path: Path, old: Old) -> None:
    got = ask(tmp_path, old)
    old.hand_over._forget(old.hand_over._successor)
    assert got.connection is not None
    events, answers = EventLoop(), []
    claim(events, got.connection, answers.append)
    events.turn(5)
    assert answers == [""]


def test_a_successor_that_goes_is_forgotten_and_a_second_one_waits_its_turn(tmp_path: Path, old: Old) -> None:
    first = ask(tmp_path, old)
    with pytest.raises(NotUsable, match="prepares to take over already"):
        ask(tmp_path, old)
    assert first.connection is not None
    first.connection.close()
    old.turn(1)
    assert old.told == ["failed"]
    assert old.done == []
    assert ask(tmp_path, old).kept == KEPT


def test_a_refusal_is_told_in_words(tmp_path: Path, old: Old) -> None:
    old.refusal = "a reload is under way"
    with pytest.raises(NotUsable, match="a reload is under way"):
        ask(tmp_path, old)
    assert old.told == []


def test_nobody_there_is_another_matter(tmp_path: Path) -> None:
    with pytest.raises(NobodyServes):
        take_over(tmp_path, "2.0")
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    dead.bind(str(hand_over_socket(tmp_path)))
    dead.close()
    with pytest.raises(NobodyServes):
        take_over(tmp_path, "2.0")


@pytest.mark.parametrize("abstract", [False, True])
def test_readiness_goes_to_the_notify_socket(tmp_path: Path, abstract: bool) -> None:
    name = f"\0numaserve-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name)
        Notifier({"NOTIFY_SOCKET": name.replace("\0", "@")}).tell("READY=1", "STATUS=well")
        assert manager.recv(100) == b"READY=1\nSTATUS=well"
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).tell("READY=1")
    Notifier({}).tell("READY=1")


def test_descriptors_meant_for_another_process_are_left_alone() -> None:
    environment = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "numaserve-state-0", "HOME": "/"}
    assert Notifier({}).inherit(environment) is None
    assert environment == {"HOME": "/"}


def test_the_store_gets_a_whole_set_before_the_last_one_goes(tmp_path: Path) -> None:
    events: list[tuple[str, str]] = []
    documents: list[KeptServer] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, socket.socket() as port:
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})

        def keep(kept: KeptServer) -> None:
            notifier.keep(kept, port.fileno(), [make_segment()])
            while True:
                try:
                    data, descriptors, _, _ = socket.recv_fds(manager, 1 << 16, 4)
                except BlockingIOError:
                    return
                lines = data.decode().split("\n")
                events.append((lines[0], lines[-1].removeprefix("FDNAME=numaserve-")))
                if "state" in lines[-1] and descriptors:
                    documents.append(KeptServer.from_json(os.pread(descriptors[0], 1 << 16, 0).decode()))

        notifier.assume(replace(KEPT, generation=6))
        keep(KEPT)
        keep(replace(KEPT, generation=8))
    stored, removed = "FDSTORE=1", "FDSTOREREMOVE=1"
    names = ("segment-{}-0", "port-{}", "state-{}")
    assert events[:3] == [(stored, name.format(7)) for name in names]
    assert sorted(events[3:6]) == sorted((removed, name.format(6)) for name in names)
    assert events[6:9] == [(stored, name.format(8)) for name in names]
    assert events[9:] == [(removed, name.format(7)) for name in names]
    assert [document.generation for document in documents] == [7, 8]
