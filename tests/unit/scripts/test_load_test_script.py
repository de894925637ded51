from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "load_test"

GHZ = """#!{python}
import json, sys
arguments = sys.argv[1:]
assert "--proto" not in arguments and "--protoset" not in arguments
print(json.dumps({{
    "average": 2e6, "rps": 50.0,
    "statusCodeDistribution": {statuses},
    "errorDistribution": {errors},
    "latencyDistribution": [{{"percentage": p, "latency": p * 1e6}} for p in (50, 95, 99)],
}}))
"""

GRPCURL = """#!{python}
import sys
answers = {{
    "list": "grpc.health.v1.Health\\nnumaserve.v1.Inference",
    "Check": '{{"status": "SERVING"}}',
    "Infer": '{{"text": "blue sea"}}',
    "InferStream": '{{"text": "blue"}}\\n{{"text": "{second}"}}',
}}
print(answers.get(sys.argv[-1].rsplit("/")[-1], ""))
"""


def run(tmp_path: Path, statuses: dict[str, int], second: str = " sea") -> subprocess.CompletedProcess[str]:
    """Run the script with stand-ins for ghz and grpcurl that give these answers."""
    errors = {f"rpc error: code = {code}": count for code, count in statuses.items() if code != "OK"}
    contents = {
        "ghz": GHZ.format(python=sys.executable, statuses=statuses, errors=errors),
        "grpcurl": GRPCURL.format(python=sys.executable, second=second),
    }
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, content in contents.items():
        (tools / name).write_text(content)
        (tools / name).chmod(0o755)
    return subprocess.run(
        [sys.executable, SCRIPT, "--json", tmp_path / "out" / "load.json"],
        env={**os.environ, "GOBIN": str(tools)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_answer_ok(tmp_path: Path) -> None:
    done = run(tmp_path, {"OK": 200})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("200/200") == 2
    report = json.loads((tmp_path / "out" / "load.json").read_text())
    assert [call["call"] for call in report["calls"]] == [
        "numaserve.v1.Inference/Infer",
        "numaserve.v1.Inference/InferStream",
    ]
    first = report["calls"][0]
    assert (first["ok"], first["mean_ms"], first["p50_ms"], first["p99_ms"]) == (200, 2.0, 50.0, 99.0)


def test_one_answer_that_is_not_ok_fails_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, {"OK": 199, "Unavailable": 1})
    assert done.returncode == 1
    assert "199/200" in done.stdout
    assert "1 x Unavailable" in done.stdout


def test_stream_that_says_something_else_fails_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, {"OK": 200}, second=" whale")
    assert done.returncode == 1
    assert "InferStream gave 'blue whale', Infer gave 'blue sea'" in done.stderr


def test_missing_tool_and_no_go_is_a_clear_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT],
        env={"PATH": "", "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "ghz is not installed, and there is no Go to build it with" in done.stderr


@pytest.mark.parametrize("name", ["infer.json", "infer_stream_chat.json"])
def test_ghz_configurations_name_methods_and_fields_of_the_contract(name: str) -> None:
    from google.protobuf.json_format import ParseDict

    from numaserve.v1 import inference_pb2

    config = json.loads((SCRIPT.parent / "ghz" / name).read_text())
    service, method = config["call"].split("/")
    descriptor = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
    assert service == descriptor.full_name
    assert method in descriptor.methods_by_name
    request = ParseDict(config["data"], inference_pb2.InferRequest())
    assert request.max_tokens > 0
    assert "proto" not in config
