"""The sizes that the plan works with are those of the files, and a model that cannot be served has none."""

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from tiny_models import make_tiny_model

from service.loader.checkpoint import CheckpointError
from service.loader.model_size import measure


def stored_elements(model_dir: Path) -> int:
    total = 0
    with safe_open(model_dir / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - a safe_open is no mapping
            total += file.get_tensor(name).numel()
    return total


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "qwen3_moe"])
def test_sizes_are_those_of_the_file(tmp_path: Path, family: str) -> None:
    sizes = measure(make_tiny_model(tmp_path, family, dtype="bfloat16"))
    assert sizes.parameters == stored_elements(tmp_path)
    assert sizes.weights_bytes == 2 * sizes.parameters
    assert (sizes.dtype, sizes.kv_dtype, sizes.vocab_size) == ("bfloat16", "bfloat16", 384)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "weight_bytes", "kv_bytes"),
    [
        ("auto", "auto", 2, 2),
        ("float32", "auto", 4, 4),
        ("auto", "float32", 2, 4),
        ("float32", "bfloat16", 4, 2),
    ],
)
def test_dtypes_count(tmp_path: Path, dtype: str, kv_dtype: str, weight_bytes: int, kv_bytes: int) -> None:
    model_dir = make_tiny_model(tmp_path, dtype="float16", head_dim=24, num_hidden_layers=3)
    sizes = measure(model_dir, dtype, kv_dtype, block_size=8)
    assert sizes.weights_bytes == sizes.parameters * weight_bytes
    assert sizes.kv_bytes_per_token == 2 * 3 * 2 * 24 * kv_bytes
    assert sizes.kv_block_bytes == 8 * sizes.kv_bytes_per_token
    assert sizes.blocks_per_sequence == 512 / 8


def test_bad_model_has_no_size(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, max_shard_size="100KB")
    next(iter(sorted(model_dir.glob("model-*.safetensors")))).unlink()
    with pytest.raises(CheckpointError, match="not there"):
        measure(model_dir)


@pytest.mark.parametrize("name", ["dtype", "kv_dtype"])
def test_unknown_dtype_is_named(tmp_path: Path, name: str) -> None:
    model_dir = make_tiny_model(tmp_path)
    with pytest.raises(ValueError, match=f"^{name}: must be auto"):
        measure(model_dir, **{name: "int3"})


def test_measuring_needs_neither_torch_nor_numpy(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path)
    program = (
        "import pathlib, sys; from service.loader.model_size import measure; "
        f"measure(pathlib.Path({str(model_dir)!r})); "
        "print([name for name in ('torch', 'numpy', 'grpc', 'safetensors') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
