"""What is wrong is said before anything serves, by file, field or flag, with exit status 2 and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest


def edit_config(model: Path, **changes: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def cut_weights(model: Path, keep: int | None) -> None:
    path = model / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1 if keep is None else keep)


def absent_shard(model: Path) -> None:
    (model / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def serve(model: Path, runtime_dir: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "service.cli.main", "serve", f"--model={model}", "--port=0"]
    return subprocess.run(
        [*command, f"--runtime-dir={runtime_dir}", *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.mark.parametrize(
    ("break_model", "named"),
    [
        (lambda model: (model / "config.json").unlink(), ["config.json"]),
        (lambda model: (model / "config.json").write_text("{"), ["config.json"]),
        (lambda model: (model / "model.safetensors").unlink(), ["model.safetensors"]),
        (lambda model: cut_weights(model, None), ["model.safetensors"]),
        (lambda model: cut_weights(model, 0), ["model.safetensors"]),
        (
            lambda model: (model / "model.safetensors").write_bytes(b"<!DOCTYPE html>" * 9),
            ["model.safetensors"],
        ),
        (absent_shard, ["model-00001-of-00002.safetensors"]),
        (lambda model: edit_config(model, architectures=["XyzForCausalLM"], model_type="xyz"), ["xyz"]),
        (
            lambda model: edit_config(model, rope_scaling={"rope_type": "spiral"}, rope_parameters=None),
            ["spiral"],
        ),
        (lambda model: edit_config(model, num_hidden_layers=5), ["layers.4."]),
        (lambda model: edit_config(model, num_hidden_layers=3), ["layers.3."]),
        (lambda model: (model / "tokenizer.json").unlink(), ["tokenizer.json"]),
    ],
    ids=[
        "no config",
        "broken config",
        "no weights",
        "weights cut by a byte",
        "empty weights",
        "a web page as weights",
        "index names an absent shard",
        "unknown architecture",
        "unknown rope type",
        "missing tensor",
        "unexpected tensor",
        "no tokenizer",
    ],
)
def test_a_bad_model_is_refused(model: Path, tmp_path: Path, break_model, named: list[str]) -> None:
    break_model(model)
    done = serve(model, tmp_path / "r")
    assert done.returncode == 2, done.stderr
    for text in named:
        assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--nodes=7"], "--nodes"),
        (["--nodes=zero"], "--nodes"),
        (["--cpunodebind=9"], "--cpunodebind"),
        (["--membind=5"], "--membind"),
        (["--physcpubind=4000"], "--physcpubind"),
        (["--kv-cache-memory=900TiB"], "memory"),
        (["--kv-cache-memory=1"], "--kv-cache-memory"),
        (["--workers-per-node=0"], "--workers-per-node"),
        (["--max-model-len=100000"], "--max-model-len"),
        (["--max-num-seqs=0"], "--max-num-seqs"),
        (["--max-num-batched-tokens=1"], "--max-num-batched-tokens"),
        (["--port=70000"], "--port"),
        (["--host=203.0.113.1"], "--host"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_bad_flag_is_refused_by_name(
    tiny_model: Path, tmp_path: Path, flags: list[str], named: str
) -> None:
    done = serve(tiny_model, tmp_path / "r", *flags)
    assert done.returncode == 2, done.stderr
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "r").exists()


def test_a_port_in_use_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        done = serve(tiny_model, tmp_path / "r", f"--port={port}")
    assert done.returncode == 2
    assert f"--port {port}: another process listens on 127.0.0.1:{port}" in done.stderr


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    done = serve(tmp_path / "nothing", tmp_path / "r")
    assert done.returncode == 2
    assert "--model" in done.stderr
