"""Weights and workers changed while the server serves: nothing fails meanwhile, and what fails to load changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from constant_load import ConstantLoad, answers_of
from served import START_SECONDS, Server, wait_until_gone
from tiny_models import make_tiny_model

from numaserve.v1 import control_pb2, control_pb2_grpc
from placement.runtime_dir import control_socket

RELOADS = int(os.environ.get("NUMASERVE_TEST_RELOADS", "20"))
FLAGS = ("--workers=2", "--kv-cache-memory=16MiB", "--dtype=float32")


def order(server: Server, method: str, request: object) -> object:
    with grpc.insecure_channel(f"unix:{control_socket(server.runtime_dir)}") as channel:
        return getattr(control_pb2_grpc.ControlStub(channel), method)(request, timeout=START_SECONDS)


def reload(server: Server, model: Path | str = "") -> control_pb2.ReloadModelResponse:
    return order(server, "ReloadModel", control_pb2.ReloadModelRequest(model_dir=str(model)))


def refusal(call: Callable[[], object]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return raised.value


def segments_mapped(server: Server) -> set[str]:
    """Inodes of the segments that some process of the server holds or maps."""
    inodes = set()
    for pid in server.pids():
        try:
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "numaserve-weights" in line:
                    inodes.add(line.split()[4])
        except OSError:
            continue
    return inodes


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.mark.timeout(1200)
def test_reloads_and_hang_ups_under_load_fail_nothing_and_give_memory_back(
    tiny_model: Path, tmp_path: Path
) -> None:
    with Server(tiny_model, tmp_path / "r", *FLAGS) as server:
        with server.client() as client:
            expected = answers_of(client)
        first_pids = {worker.pid for worker in server.status().workers}
        reload(server)
        memory, open_files = (
            server.status().total_pss_bytes,
            len(os.listdir(f"/proc/{server.process.pid}/fd")),
        )
        with ConstantLoad(server.address, expected) as load:
            for _ in range(RELOADS):
                reload(server)
            for _ in range(RELOADS):
                mark = len(server.log.lines)
                server.process.send_signal(signal.SIGHUP)
                server.log.wait_for("reload: done", after=mark)
        assert load.faults == []
        assert next(load.answers) > 2 * RELOADS
        status = server.status()
        assert status.generation == 2 * RELOADS + 1
        assert not first_pids & {worker.pid for worker in status.workers}
        assert len(segments_mapped(server)) == 1
        assert status.total_pss_bytes < 1.2 * memory
        assert len(os.listdir(f"/proc/{server.process.pid}/fd")) <= open_files
        with server.client() as client:
            assert answers_of(client) == expected


def test_other_weights_follow_and_a_link_is_followed_anew(
    tiny_model: Path, other_model: Path, tmp_path: Path
) -> None:
    link = tmp_path / "current"
    link.symlink_to(tiny_model)
    with Server(link, tmp_path / "r", *FLAGS, "--worker-ports=0") as server:
        with server.client() as client:
            first, info = answers_of(client), client.model_info()
        link.unlink()
        link.symlink_to(other_model)
        with ConstantLoad(server.address) as load:
            answer = reload(server)
        assert load.faults == []
        assert (answer.generation, Path(answer.model_dir)) == (1, other_model)
        with server.client() as client:
            second = answers_of(client)
            assert second != first
            assert client.model_info().weights_digest == answer.digests[0] != info.weights_digest
        assert Path(reload(server, tiny_model).model_dir) == tiny_model
        with server.client() as client:
            assert answers_of(client) == first
        assert Path(reload(server).model_dir) == tiny_model


def break_shard(model: Path) -> None:
    (model / "model.safetensors").unlink()


def cut_shard(model: Path) -> None:
    path = model / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def break_architecture(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({**config, "model_type": "nonesuch", "architectures": ["Nonesuch"]})
    )


def break_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")


@pytest.mark.timeout(600)
def test_what_cannot_be_served_is_refused_and_the_old_weights_go_on(tiny_model: Path, tmp_path: Path) -> None:
    faults = [
        (break_shard, grpc.StatusCode.INVALID_ARGUMENT, "model.safetensors"),
        (cut_shard, grpc.StatusCode.INVALID_ARGUMENT, "is truncated"),
        (break_architecture, grpc.StatusCode.INVALID_ARGUMENT, "nonesuch"),
        (break_tokenizer, grpc.StatusCode.FAILED_PRECONDITION, "tokenizer.json"),
    ]
    nan_model = make_tiny_model(tmp_path / "nan", std=float("nan"))
    with Server(tiny_model, tmp_path / "r", *FLAGS) as server:
        with server.client() as client:
            expected = answers_of(client)
        pids = [worker.pid for worker in server.status().workers]
        with ConstantLoad(server.address, expected) as load:
            for number, (break_it, code, words) in enumerate(faults):
                broken = Path(shutil.copytree(tiny_model, tmp_path / f"broken-{number}"))
                break_it(broken)
                error = refusal(lambda broken=broken: reload(server, broken))
                assert error.code() is code, error.details()
                assert words in error.details()
            error = refusal(lambda: reload(server, nan_model))
            assert "the trial request" in error.details()
            error = refusal(lambda: reload(server, tmp_path / "nowhere"))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "model_dir" in error.details()
        assert load.faults == []
        status = server.status()
        assert [worker.pid for worker in status.workers] == pids
        assert (status.generation, status.change) == (0, "")
        assert "nowhere" in status.last_error
        assert len(segments_mapped(server)) == 1


def test_a_loader_that_is_killed_ends_the_reload_alone(tiny_model: Path, tmp_path: Path) -> None:
    program = (str(Path(__file__).parents[1] / "held_loader_program.py"),)
    with Server(tiny_model, tmp_path / "r", *FLAGS, program=program) as server:
        pids = [worker.pid for worker in server.status().workers]
        errors: list[grpc.RpcError] = []
        caller = threading.Thread(target=lambda: errors.append(refusal(lambda: reload(server))))
        caller.start()
        line = server.log.wait_for(" waits")
        loader = int(line["message"].split()[1])
        assert (server.status().change, server.status().change_phase) == ("reload", "loading")
        os.kill(loader, signal.SIGKILL)
        caller.join()
        assert errors[0].code() is grpc.StatusCode.ABORTED
        assert "killed by SIGKILL" in errors[0].details()
        wait_until_gone([loader])
        assert [worker.pid for worker in server.status().workers] == pids
        with server.client() as client:
            assert client.infer("hello", max_tokens=2).token_ids


@pytest.mark.timeout(600)
def test_workers_are_drained_added_and_removed_under_load(tiny_model: Path, tmp_path: Path) -> None:
    with Server(tiny_model, tmp_path / "r", *FLAGS) as server:
        with server.client() as client:
            expected = answers_of(client)
        loads = [line for line in server.log.lines if "weights bound" in line["message"]]
        with ConstantLoad(server.address, expected) as load:
            order(server, "Drain", control_pb2.DrainRequest(worker=1))
            assert [worker.state for worker in server.status().workers] == ["serving", "drained"]
            error = refusal(lambda: order(server, "Drain", control_pb2.DrainRequest(node=0)))
            assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
            reload(server)
            assert [worker.state for worker in server.status().workers] == ["serving", "drained"]
            order(server, "Drain", control_pb2.DrainRequest(worker=1, undo=True))
            assert [worker.state for worker in server.status().workers] == ["serving", "serving"]
            order(server, "SetWorkers", control_pb2.SetWorkersRequest(workers=3))
            assert [worker.state for worker in server.status().workers] == ["serving"] * 3
            mark = len(server.log.lines)
            server.process.send_signal(signal.SIGTTOU)
            server.log.wait_for("scale to 2 workers: done", after=mark)
            assert [worker.state for worker in server.status().workers] == ["serving"] * 2
        assert load.faults == []
        again = [line for line in server.log.lines if "weights bound" in line["message"]]
        assert len(again) == len(loads) + 1


@pytest.mark.parametrize(
    ("method", "request_message", "field"),
    [
        ("SetWorkers", control_pb2.SetWorkersRequest(workers=0), "workers"),
        ("SetWorkers", control_pb2.SetWorkersRequest(workers=-1), "workers"),
        ("Drain", control_pb2.DrainRequest(), "worker"),
        ("Drain", control_pb2.DrainRequest(worker=7), "worker"),
        ("Drain", control_pb2.DrainRequest(worker=-1), "worker"),
        ("Drain", control_pb2.DrainRequest(node=99), "node"),
    ],
)
def test_bad_orders_name_their_field(
    one_server: Server, method: str, request_message: object, field: str
) -> None:
    error = refusal(lambda: order(one_server, method, request_message))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(f"{field}: ")


@pytest.fixture(scope="module")
def one_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory):
    with Server(tiny_model, tmp_path_factory.mktemp("one") / "r", *FLAGS) as server:
        yield server
