"""Checkpoints that are cut, malformed or at odds with their index are refused, and the file at fault is named."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from service.loader.checkpoint import CheckpointError, open_checkpoint


def header_entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def safetensors(header: Any, data: bytes) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


GOOD_HEADER = {
    "__metadata__": {"format": "pt"},
    "b": header_entry(8, 24, [2, 2]),
    "a": header_entry(0, 8, [2]),
    "empty": header_entry(24, 24, [0, 4]),
}
GOOD = safetensors(GOOD_HEADER, bytes(24))


def folder(tmp_path: Path, files: dict[str, bytes], config: bytes | None = b"{}") -> Path:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    if config is not None:
        (tmp_path / "config.json").write_bytes(config)
    return tmp_path


def index(weight_map: Any) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": weight_map}).encode()


def shard(*names: str) -> bytes:
    return safetensors(
        {n: header_entry(4 * i, 4 * i + 4, [1]) for i, n in enumerate(names)}, bytes(4 * len(names))
    )


def test_single_file_is_described_without_its_data(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(
        folder(tmp_path, {"model.safetensors": GOOD, "generation_config.json": b'{"x": 1}'})
    )
    data_start = len(GOOD) - 24
    tensor = checkpoint.tensors["b"]
    assert (tensor.dtype, tensor.shape, tensor.nbytes, tensor.offset) == ("F32", (2, 2), 16, data_start + 8)
    assert sorted(checkpoint.tensors) == ["a", "b", "empty"]
    assert checkpoint.generation_config == {"x": 1}


def test_index_decides_which_files_are_read(tmp_path: Path) -> None:
    files = {
        "model-1.safetensors": shard("a"),
        "model-2.safetensors": shard("b", "c"),
        "model.safetensors.index.json": index(
            {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
        ),
        "consolidated.safetensors": b"never opened",
        "model-3-int8.safetensors": shard("a"),
    }
    checkpoint = open_checkpoint(folder(tmp_path, files))
    assert {name: tensor.file.name for name, tensor in checkpoint.tensors.items()} == {
        "a": "model-1.safetensors",
        "b": "model-2.safetensors",
        "c": "model-2.safetensors",
    }


BAD_FILES = {
    "0 bytes": (b"", "is empty"),
    "too short": (b"abc", "too short"),
    "cut by one byte": (GOOD[:-1], "is truncated"),
    "one byte too many": (GOOD + b"x", "1 more than its header describes"),
    "cut in the header": (GOOD[:40], "truncated or no safetensors file"),
    "huge header length": (b"\xff" * 8 + GOOD[8:], "claims a header of"),
    "git lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "Git LFS pointer"),
    "html page": (b"<!DOCTYPE html><html><body>Not found</body></html>", "HTML"),
    "garbage in the header": (safetensors(b"\x00garbage{{", b""), "not valid JSON"),
    "header is a list": (safetensors([], b""), "not a JSON object"),
    "deeply nested header": (safetensors(b"[" * 100000, b""), "not valid JSON"),
    "name twice": (safetensors(b'{"a": {}, "a": {}}', b""), "twice"),
    "entry is a number": (safetensors({"a": 1}, b""), "tensor a is not described"),
    "unknown dtype": (safetensors({"a": header_entry(0, 4, [1], "F31")}, bytes(4)), "unknown dtype 'F31'"),
    "dtype missing": (
        safetensors({"a": {"shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
        "unknown dtype None",
    ),
    "negative size": (safetensors({"a": header_entry(0, 4, [-1])}, bytes(4)), "has shape [-1]"),
    "size is true": (
        safetensors({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, b"x"),
        "has shape",
    ),
    "offsets reversed": (safetensors({"a": header_entry(4, 0, [1])}, bytes(4)), "has data_offsets [4, 0]"),
    "one offset": (
        safetensors({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}, b"x"),
        "data_offsets [0]",
    ),
    "shape and offsets disagree": (
        safetensors({"a": header_entry(0, 4, [2])}, bytes(4)),
        "shape [2] takes 8",
    ),
    "offsets overlap": (
        safetensors({"a": header_entry(0, 8, [2]), "b": header_entry(4, 12, [2])}, bytes(12)),
        "tensor b overlaps",
    ),
    "offsets leave a gap": (
        safetensors({"a": header_entry(0, 4, [1]), "b": header_entry(8, 12, [1])}, bytes(12)),
        "tensor b leaves a gap",
    ),
    "no tensor": (safetensors({}, b""), "holds no tensor"),
}


@pytest.mark.parametrize(("content", "problem"), BAD_FILES.values(), ids=BAD_FILES)
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "shard"])
def test_bad_weights_file_is_named(tmp_path: Path, content: bytes, problem: str, sharded: bool) -> None:
    files = {"model.safetensors": content}
    if sharded:
        if problem == "holds no tensor":
            problem = "lacks tensor z"
        files = {"second.safetensors": content, "first.safetensors": shard("ok")}
        files["model.safetensors.index.json"] = index({"ok": "first.safetensors", "z": "second.safetensors"})
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder(tmp_path, files))
    assert caught.value.path.name == ("second.safetensors" if sharded else "model.safetensors")
    assert problem in str(caught.value)


BAD_INDEXES = {
    "names absent files": (index({"a": "one.safetensors", "b": "gone.safetensors"}), "gone.safetensors"),
    "names a tensor that its shard lacks": (
        index({"a": "one.safetensors", "b": "one.safetensors"}),
        "lacks tensor b",
    ),
    "does not know a tensor of its shard": (index({"b": "two.safetensors"}), "for which"),
    "leads out of the folder": (index({"a": "../one.safetensors"}), "not a plain file name"),
    "file name is a number": (index({"a": 1}), "not a plain file name"),
    "no weight map": (b"{}", "has no weight_map"),
    "empty weight map": (index({}), "has no weight_map"),
    "not JSON": (b"{", "not valid JSON"),
}


@pytest.mark.parametrize(("content", "problem"), BAD_INDEXES.values(), ids=BAD_INDEXES)
def test_bad_index_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    files = {
        "one.safetensors": shard("a"),
        "two.safetensors": shard("b", "c"),
        "model.safetensors.index.json": content,
    }
    with pytest.raises(CheckpointError, match="safetensors") as caught:
        open_checkpoint(folder(tmp_path, files))
    assert problem in str(caught.value)


def test_stale_index_counts_what_is_absent(tmp_path: Path) -> None:
    names = {f"t{i}": f"model-{i:02}.safetensors" for i in range(30)}
    files = {names[f"t{i}"]: shard(f"t{i}") for i in range(15)}
    with pytest.raises(
        CheckpointError, match=r"names 15 of 30 files that are not there: model-15\.safetensors"
    ):
        open_checkpoint(folder(tmp_path, {**files, "model.safetensors.index.json": index(names)}))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (None, "does not exist"),
        (b"{,}", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"\xff\xfe", "not valid JSON"),
    ],
)
def test_bad_config_json_is_named(tmp_path: Path, config: bytes | None, problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem) as caught:
        open_checkpoint(folder(tmp_path, {"model.safetensors": GOOD}, config))
    assert caught.value.path.name == "config.json"


def test_folder_without_weights_says_what_it_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"found only consolidated\.safetensors, pytorch_model\.bin"):
        open_checkpoint(folder(tmp_path, {"pytorch_model.bin": b"x", "consolidated.safetensors": GOOD}))


@pytest.mark.parametrize("name", ["absent", "file"])
def test_model_path_that_is_no_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is not a directory"):
        open_checkpoint(tmp_path / name)


def test_shard_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        open_checkpoint(folder(tmp_path, {}))
