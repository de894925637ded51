"""A new launcher serves the weights that an old one left in memory: the checkpoint is not opened again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path

import pytest
from constant_load import ConstantLoad, answers_of
from fake_service_manager import FakeServiceManager
from file_opens import FileOpens
from served import Server, wait_until_gone

FLAGS = ("--workers=2", "--kv-cache-memory=16MiB", "--dtype=float32", "--drain-timeout=20")


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.mark.timeout(600)
def test_a_new_launcher_takes_over_under_load_without_a_look_at_the_checkpoint(
    model: Path, tmp_path: Path
) -> None:
    runtime = tmp_path / "r"
    with (
        Server(model, runtime, *FLAGS) as before,
        contextlib.ExitStack() as successors,
        FileOpens(model / "model.safetensors") as opens,
    ):
        address = before.address
        with before.client() as client:
            expected, digest = answers_of(client), client.model_info().weights_digest
        with ConstantLoad(address, expected) as load:
            # The second takes over from one that has taken over itself.
            for generation in (1, 2):
                new = successors.enter_context(Server(model, runtime, *FLAGS, "--take-over"))
                assert before.process.wait(120) == 0
                status = new.status()
                assert (status.address, status.generation) == (address, generation)
                assert status.launcher_pid == new.process.pid
                before = new
        assert load.faults == []
        assert next(load.answers) > 0
        with before.client() as client:
            assert answers_of(client) == expected
            assert client.model_info().weights_digest == digest
        assert opens.count() == 0
    assert not runtime.exists()


def test_a_successor_that_fails_changes_nothing(model: Path, tmp_path: Path) -> None:
    runtime = tmp_path / "r"
    with Server(model, runtime, *FLAGS) as old:
        pids = [worker.pid for worker in old.status().workers]
        (model / "model.safetensors").rename(tmp_path / "away")
        # Other weights are asked for, and there are none.
        refused = Server(model, runtime, *FLAGS, "--dtype=bfloat16", "--take-over")
        assert refused.process.wait(60) == 2
        assert "wanted is bfloat16" in refused.log.finish()
        killed = Server(model, runtime, *FLAGS, "--take-over")
        mark = len(old.log.lines)
        old.log.wait_for("prepares to take over", after=mark - 1)
        killed.process.kill()
        killed.process.wait()
        old.log.wait_for("is gone; this server goes on", after=mark)
        assert [worker.pid for worker in old.status().workers] == pids
        with Server(model, runtime, *FLAGS, "--take-over") as new:
            assert old.process.wait(60) == 0
            with new.client() as client:
                assert client.infer("hello", max_tokens=2).token_ids
        wait_until_gone(pids)


def test_a_reload_while_a_successor_prepares_goes_first(model: Path, tmp_path: Path) -> None:
    runtime = tmp_path / "r"
    with Server(model, runtime, *FLAGS) as old:
        new = Server(model, runtime, *FLAGS, "--take-over")
        old.log.wait_for("prepares to take over")
        # What is slow to start does not hold a reload up; its segments are the old ones by then, and it leaves.
        os.kill(new.process.pid, signal.SIGSTOP)
        old.process.send_signal(signal.SIGHUP)
        old.log.wait_for("reload: done")
        os.kill(new.process.pid, signal.SIGCONT)
        assert new.process.wait(120) == 1
        assert "serves generation 1 by now, it offered 0" in new.log.finish()
        with old.client() as client:
            assert client.infer("hello", max_tokens=2).token_ids
        assert old.status().generation == 1


def test_weights_whose_files_changed_are_read_again(model: Path, tmp_path: Path) -> None:
    runtime = tmp_path / "r"
    with Server(model, runtime, *FLAGS) as old:
        os.utime(model / "model.safetensors")
        with Server(model, runtime, *FLAGS, "--take-over") as new:
            line = new.log.wait_for("the checkpoint is read again")
            assert "model.safetensors changed since" in line["message"]
            assert old.process.wait(60) == 0
            with new.client() as client:
                assert client.infer("hello", max_tokens=2).token_ids


def test_without_a_server_it_starts_afresh_and_without_the_flag_it_is_refused(
    model: Path, tmp_path: Path
) -> None:
    with Server(model, tmp_path / "r", *FLAGS, "--take-over") as server:
        server.log.wait_for("no server runs in ")
        other = Server(model, tmp_path / "r", *FLAGS)
        assert other.process.wait(60) == 2
        assert "--take-over upgrades it in place" in other.log.finish()


def test_segments_survive_the_launcher_in_the_service_managers_store(model: Path, tmp_path: Path) -> None:
    manager = FakeServiceManager(tmp_path)
    runtime = tmp_path / "r"
    with manager.start(model, runtime, *FLAGS) as first:
        manager.wait_for_state(0)
        assert "READY=1" in manager.assignments
        address = first.address
        with first.client() as client:
            expected = answers_of(client)
        family = first.pids()
        first.process.kill()
        wait_until_gone(family)
    (model / "model.safetensors").rename(tmp_path / "away")
    with manager.start(model, runtime, *FLAGS) as second:
        second.log.wait_for("the weights in memory are used")
        assert second.address == address
        with second.client() as client:
            assert answers_of(client) == expected
        manager.wait_for_state(1, only=True)
        (tmp_path / "away").rename(model / "model.safetensors")
        mark = len(second.log.lines)
        second.process.send_signal(1)
        second.log.wait_for("reload: done", after=mark)
        manager.wait_for_state(2, only=True)
        assert any(line.startswith("RELOADING=1") for line in manager.assignments)
    assert "STOPPING=1" in manager.assignments


def test_what_the_store_lacks_is_read_again(model: Path, tmp_path: Path) -> None:
    manager = FakeServiceManager(tmp_path)
    with manager.start(model, tmp_path / "r", *FLAGS):
        manager.wait_for_state(0)
    os.close(manager.store.pop("numaserve-segment-0-0"))
    with manager.start(model, tmp_path / "r", *FLAGS) as second:
        line = second.log.wait_for("what the service manager kept is not used")
        assert "numaserve-segment-0-0" in line["message"]
        with second.client() as client:
            assert client.infer("hello", max_tokens=2).token_ids
