"""The scripts, run as a user runs them, against real servers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from served import Server

from service.kernels.layout import why_unusable

ROOT = Path(__file__).parents[2]


def run_script(*command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_real_ghz_and_grpcurl_get_every_answer(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--workers-per-node=2", "--kv-cache-memory=16MiB", "--dtype=float32")
    with Server(tiny_model, tmp_path / "r", *flags) as server:
        done = run_script(
            sys.executable,
            ROOT / "scripts" / "load_test",
            *("--address", server.address, "--json", tmp_path / "load.json"),
        )
        served = [worker.requests for worker in server.status().workers]
    assert done.returncode == 0, done.stdout + done.stderr
    calls = {call["call"]: call["ok"] for call in json.loads((tmp_path / "load.json").read_text())["calls"]}
    assert calls == {"numaserve.v1.Inference/Infer": 200, "numaserve.v1.Inference/InferStream": 200}
    # One call of each from grpcurl.
    assert sum(served) == 402


def test_bench_memory_measures_one_copy(tiny_model: Path, tmp_path: Path) -> None:
    done = run_script(
        *(sys.executable, ROOT / "scripts" / "bench_memory", "--model", tiny_model, "--workers", "1,2"),
        *("--json", tmp_path / "memory.json", "--", "--kv-cache-memory=8MiB", "--dtype=float32"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "memory.json").read_text())
    assert [server["workers"] for server in report["server"]] == [1, 2]
    for server, alone in zip(report["server"], report["separate_processes"], strict=True):
        assert 0 < server["weights_pss"] <= 1.01 * server["segment"]
        assert len(server["own"]) == server["workers"]
        assert alone["load_file_as_float32"] > 0
    assert 0 < report["server"][1]["added_per_worker"] < 120 << 20


@pytest.mark.timeout(600)
def test_bench_recovery_measures_every_event(tiny_model: Path, tmp_path: Path) -> None:
    done = run_script(
        *(sys.executable, ROOT / "scripts" / "bench_recovery", "--model", tiny_model, "--repeats=1"),
        *("--port", free_port(), "--json", tmp_path / "recovery.json"),
        *("--", "--kv-cache-memory=8MiB", "--dtype=float32"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = json.loads((tmp_path / "recovery.json").read_text())
    assert [event["event"] for event in report["events"]] == [
        "a plain process loads it",
        "fresh start",
        "worker killed",
        "an answer when nothing happens",
        "worker killed: median",
        "  until it serves, as the log tells",
        "worker and zygote killed",
        "reload: first new answer",
        "reload: old memory free",
        "upgrade in place, from its start",
        "upgrade in place, the hand-over",
        "killed, restarted from the store",
    ]
    assert all(event["seconds"] > 0 for event in report["events"])


def test_bench_engine_measures_every_part(tiny_model: Path, tmp_path: Path) -> None:
    done = run_script(
        *(sys.executable, ROOT / "scripts" / "bench_engine", "--model", tiny_model, "--steps", "3"),
        *("--streams", "1,3", "--prompts", "16,64,4096", "--json", tmp_path / "engine.json"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "engine.json").read_text())
    assert [row["streams"] for row in report["generation, greedy"]] == [1, 3]
    # A prompt beyond the model's context is left out.
    assert [row["prompt_tokens"] for row in report["prefill"]] == [16, 64]
    own = report["sampling and overhead per step, no decoder"]
    every = {"greedy", "temperature", "top_p", "top_k", "min_p", "typical_p"}
    assert {row["parameters"] for row in own} == every
    assert all(0 < row["engine_ms"] < row["overhead_ms"] for row in own)
    for row in report["generation, greedy"]:
        assert 0 < row["model_ms"] < row["step_ms"]


def test_bench_engine_says_what_is_wrong_with_a_model(tmp_path: Path) -> None:
    done = run_script(sys.executable, ROOT / "scripts" / "bench_engine", "--model", tmp_path)
    assert done.returncode == 1
    assert "config.json" in done.stderr


def test_bench_cpu_measures_every_part(tiny_model: Path, tmp_path: Path) -> None:
    if why_unusable() is not None:
        pytest.skip("the native kernels are not built")
    done = run_script(
        *(sys.executable, ROOT / "scripts" / "bench_cpu", "--model", tiny_model, "--no-llama"),
        *("--rounds", "1", "--formats", "bf16,int8", "--streams", "1,2", "--prompt", "16", "--new", "24"),
        *("--long-prompt", "64", "--context", "128", "--context-streams", "2", "--context-rounds", "1"),
        *("--perplexity-tokens", "256", "--json", tmp_path / "cpu.json"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "cpu.json").read_text())
    measured = {(each["part"], each["subject"], each["streams"]) for each in report["samples"]}
    for subject in ("numaserve bf16", "numaserve int8", "transformers bf16"):
        assert {("speed", subject, 1), ("speed", subject, 2)} <= measured
    assert ("context", "numaserve bf16", 2) in measured
    # Both are the same tokens; how likely they are differs by the rounding alone.
    (exact, count), (rounded, same_count) = report["perplexity"].values()
    assert count == same_count == 256 - 4
    assert abs(rounded / exact - 1) < 0.05
    assert report["limits"][0]["read_bytes"] > 0
    assert "tokens/s" in done.stdout
    assert "machine: reads" in done.stdout


def test_bench_cpu_names_what_it_does_not_know() -> None:
    done = run_script(sys.executable, ROOT / "scripts" / "bench_cpu", "--formats", "bf16,int3")
    assert done.returncode == 2
    assert "--formats: unknown 'int3'" in done.stderr


def test_bench_memory_shows_why_a_server_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = run_script(
        sys.executable, ROOT / "scripts" / "bench_memory", "--model", tmp_path / "empty", "--workers", "1"
    )
    assert done.returncode == 1
    assert "ended before it was ready" in done.stderr
    assert "config.json" in done.stderr


@pytest.fixture
def quickstart_cache(demo_model: Path, tmp_path: Path) -> Path:
    """A cache of its own, which already holds the demo model."""
    models = tmp_path / "cache" / "numaserve" / "models"
    models.parent.mkdir(parents=True)
    models.symlink_to(demo_model.parent)
    return tmp_path / "cache"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_quickstart_answers_and_is_reused_and_stops(quickstart_cache: Path) -> None:
    script, port, cache = ROOT / "scripts" / "quickstart", free_port(), str(quickstart_cache)
    state = quickstart_cache / "numaserve" / "quickstart.server"
    try:
        first = run_script(script, "--port", port, XDG_CACHE_HOME=cache)
        assert first.returncode == 0, first.stdout + first.stderr
        assert "Paris" in first.stdout
        pid = int(state.read_text().split()[0])
        again = run_script(script, "--port", port, XDG_CACHE_HOME=cache)
        assert again.returncode == 0, again.stdout + again.stderr
        assert f"the server of an earlier run serves on 127.0.0.1:{port} (pid {pid})" in again.stderr
        assert "Paris" in again.stdout
        elsewhere = run_script(script, "--port", free_port(), XDG_CACHE_HOME=cache)
        assert elsewhere.returncode == 1
        assert f"already serves on port {port}" in elsewhere.stderr
    finally:
        stopped = run_script(script, "--stop", XDG_CACHE_HOME=cache)
    assert stopped.returncode == 0, stopped.stderr
    assert not Path(f"/proc/{pid}").exists()
    assert not state.exists()


def test_quickstart_refuses_a_port_in_use(quickstart_cache: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        done = run_script(
            ROOT / "scripts" / "quickstart", "--port", port, XDG_CACHE_HOME=str(quickstart_cache)
        )
    assert done.returncode == 1
    assert f"port {port} is used by another program" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "0"], "--port must be 1 to 65535"),
        (["--port", "70000"], "--port must be 1 to 65535"),
        (["--port"], "--port needs a number"),
        (["--prot", "1"], "unknown argument: --prot"),
    ],
)
def test_quickstart_refuses_bad_arguments(arguments: list[str], message: str) -> None:
    done = run_script(ROOT / "scripts" / "quickstart", *arguments)
    assert done.returncode == 1
    assert message in done.stderr


def test_quickstart_stop_without_a_server_is_no_error(tmp_path: Path) -> None:
    done = run_script(ROOT / "scripts" / "quickstart", "--stop", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0
    assert "No server of quickstart is running." in done.stdout
