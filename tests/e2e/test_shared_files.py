"""`--placement shared`: the checkpoint's own pages are the weights, once per host, and trouble with the files is said."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Server
from tiny_models import make_tiny_model

from placement.residency import process_memory

FLAGS = ("--placement=shared", "--workers-per-node=2", "--kv-cache-memory=8MiB")
REQUEST = {"prompt": "The quick brown fox", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 30 MB of bfloat16 in several files."""
    return make_tiny_model(
        tmp_path_factory.mktemp("models") / "in-files",
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=6,
        dtype="bfloat16",
        max_shard_size="10MB",
    )


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Iterator[Path]:
    """Files of its own, which nobody else maps."""
    yield Path(shutil.copytree(model, tmp_path / "model"))
    shutil.rmtree(tmp_path / "model")


def verify(server: Server) -> tuple[int, dict]:
    command = [sys.executable, "-m", "service.cli.main", "verify", str(server.process.pid), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout)


def weights_pss(server: Server, paths: list[str]) -> int:
    return sum(process_memory(pid, paths).weights_pss for pid in server.pids())


def test_two_servers_hold_the_weights_once_per_host_and_answer_as_ever(copy: Path, tmp_path: Path) -> None:
    files = sorted(copy.glob("*.safetensors"))
    assert len(files) > 2
    paths, size = [str(path) for path in files], sum(path.stat().st_size for path in files)
    with Server(copy, tmp_path / "loaded", "--workers-per-node=1", "--backend=torch", *FLAGS[2:]) as loaded:
        with loaded.client() as client:
            expected = list(client.infer(**REQUEST).token_ids)
        digest = loaded.status().segments[0].digest
    with Server(copy, tmp_path / "a", *FLAGS) as first, Server(copy, tmp_path / "b", *FLAGS) as second:
        for server in (first, second):
            for worker in range(2):
                with server.client(worker) as client:
                    assert list(client.infer(**REQUEST).token_ids) == expected
        status = first.status()
        assert (status.placement_policy, status.segments[0].digest) == ("shared", digest)
        assert status.segments[0].bytes == size
        assert status.segments[0].verdict == "unbound"
        assert "in the page cache of the checkpoint" in status.segments[0].explanation
        assert weights_pss(first, paths) + weights_pss(second, paths) == pytest.approx(size, rel=0.02)
        assert status.weights_pss_bytes == pytest.approx(size / 2, rel=0.05)
        code, answer = verify(first)
        assert (code, answer["sound"]) == (0, True)
        assert sum(entry["kind"] == "segment" for entry in answer["checks"]) == 1
        os.kill(status.workers[1].pid, 9)
        first.log.wait_for("worker 1 serves again")
        with first.client(1) as client:
            assert list(client.infer(**REQUEST).token_ids) == expected


def test_a_file_that_is_written_to_is_found_and_no_new_worker_serves_it(copy: Path, tmp_path: Path) -> None:
    path = min(copy.glob("*.safetensors"))
    with Server(copy, tmp_path / "r", *FLAGS) as server:
        os.utime(path, ns=(1, 1))
        code, answer = verify(server)
        (segment,) = [check for check in answer["checks"] if check["kind"] == "segment"]
        assert (code, segment["local"]) == (1, False)
        assert f"{path}: was written to since it was loaded" in segment["explanation"]
        os.kill(server.status().workers[0].pid, 9)
        assert server.process.wait(60) == 2
        assert f"{path}: was written to since it was loaded" in server.log.finish()


def test_a_file_that_is_cut_ends_its_readers_and_the_server_says_why(copy: Path, tmp_path: Path) -> None:
    path = max(copy.glob("*.safetensors"))
    with Server(copy, tmp_path / "r", *FLAGS) as server:
        os.truncate(path, 4096)
        with server.client(0) as client, pytest.raises(Exception, match=r"UNAVAILABLE|ended"):
            client.infer(**REQUEST)
        assert server.process.wait(60) == 2
        log = server.log.finish()
        assert "killed by SIGBUS" in log
        assert f"{path}: was " in log
        assert "bytes long when it was loaded, is 4096 now" in log


def test_what_would_be_converted_is_refused_by_flag_and_file(copy: Path, tmp_path: Path) -> None:
    server = Server(copy, tmp_path / "r", *FLAGS, "--dtype=float32")
    assert server.process.wait(60) == 2
    log = server.log.finish()
    assert "--placement shared: serves files as they are, but " in log
    assert "would be converted to float32 for --dtype float32" in log
