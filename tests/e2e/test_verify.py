"""`numaserve verify`, and serving where a container refuses the calls that place memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from served import Server

TESTS = Path(__file__).parents[1]
MAIN = (sys.executable, "-m", "service.cli.main")
FLAGS = ("--workers-per-node=1", "--kv-cache-memory=4MiB")
REQUEST = {"prompt": "The quick brown fox", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def verify(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*MAIN, "verify", *arguments], capture_output=True, text=True, check=False)


def test_a_server_is_found_by_pid_or_folder_and_every_line_is_ok(tiny_model: Path, tmp_path: Path) -> None:
    with Server(tiny_model, tmp_path / "r", *FLAGS) as server:
        with server.client(0) as client:
            client.infer(**REQUEST)
        found = verify(str(server.process.pid))
        assert found.returncode == 0, found.stderr
        segment, cache = found.stdout.splitlines()
        assert segment.startswith("ok     segment ")
        assert cache.startswith("ok     KV cache of worker 0 on ")
        answer = json.loads(verify(f"--runtime-dir={server.runtime_dir}", "--json", "--repair").stdout)
        assert answer["sound"]
        assert [(check["kind"], check["repair"]) for check in answer["checks"]] == [
            ("segment", ""),
            ("kv_cache", ""),
        ]
        status = server.status()
        assert status.segments[0].explanation == answer["checks"][0]["explanation"]
        assert status.workers[0].kv_explanation == answer["checks"][1]["explanation"]
        assert [worker.kv_verdict for worker in status.workers] == ["bound"]
        stranger = verify(str(server.status().workers[0].pid))
        assert stranger.returncode == 1
        assert "is not the launcher of a server" in stranger.stderr


@pytest.mark.parametrize("call", ["mbind", "set_mempolicy", "get_mempolicy", "move_pages", "migrate_pages"])
def test_a_server_without_one_of_the_calls_serves_and_says_what_is_missing(
    call: str, tiny_model: Path, tmp_path: Path
) -> None:
    program = (str(TESTS / "seccomp_deny.py"), call, *MAIN)
    with Server(tiny_model, tmp_path / "r", *FLAGS, program=program) as server:
        with server.client(0) as client:
            assert len(client.infer(**REQUEST).token_ids) == 4
        found = verify(str(server.process.pid))
        assert found.returncode == 0, found.stdout + found.stderr
        (segment,) = server.status().segments
        assert segment.verdict == ("unbound" if call == "mbind" else "bound")
        if call == "mbind":
            assert "by first touch" in segment.explanation
            assert "add CAP_SYS_NICE (docker run --cap-add SYS_NICE)" in segment.explanation
        if call == "move_pages":
            assert "counted through numa_maps because move_pages is refused" in segment.explanation
        (refusal,) = {
            line["message"] for line in server.log.lines if line["message"].startswith(f"plan: {call} ")
        }
        assert "refused (EPERM: a seccomp filter is active" in refusal
        assert "SYS_NICE" in refusal
