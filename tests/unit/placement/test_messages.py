"""Messages between processes: what is sent is what arrives, descriptors too, and a dead peer is noticed."""

import os

import pytest

from placement.messages import (
    Channel,
    ForkWorker,
    LoadProgress,
    Message,
    SegmentBuilt,
    SegmentState,
    ServerState,
    WorkerPlace,
)

STATE = ServerState(
    state="serving",
    model="m",
    address="127.0.0.1:1",
    version="1",
    launcher_pid=1,
    started_at=1.5,
    placement_policy="replicate",
    placement_reason="it fits",
    helper_pids=(3, 4),
    segments=(SegmentState("node0", 10, "d", "float32", "bound", "all", 0.5, ((0, 5), (1, 6))),),
    workers=tuple(
        WorkerPlace(index, "node0", 9, True, (0, 1), 1 << 40, 0, "unix:/x") for index in range(200)
    ),
)


@pytest.mark.parametrize(
    "message",
    [
        LoadProgress(1, 1 << 45),
        ForkWorker(3, (0, 2, 5), 2, 1 << 33),
        SegmentBuilt(1, "d", "bfloat16", "bound", "ä 東", 1.25, ((0, 7),), ("a", "b")),
        STATE,
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    here, there = Channel.pair()
    here.send(message)
    assert there.receive() == (message, [])


def test_descriptors_travel_with_their_message() -> None:
    here, there = Channel.pair()
    reader, writer = os.pipe()
    here.send(LoadProgress(0, 1))
    here.send(LoadProgress(1, 1), [writer])
    os.close(writer)
    assert there.receive() == (LoadProgress(0, 1), [])
    received = there.receive()
    assert received is not None
    (copy,) = received[1]
    assert not os.get_inheritable(copy)
    os.write(copy, b"through the copy")
    assert os.read(reader, 100) == b"through the copy"


def test_end_of_file_is_none_and_sending_to_nobody_raises() -> None:
    here, there = Channel.pair()
    there.send(LoadProgress(1, 2))
    there.close()
    assert here.receive() == (LoadProgress(1, 2), [])
    assert here.receive() is None
    with pytest.raises(BrokenPipeError):
        here.send(LoadProgress(1, 2))
