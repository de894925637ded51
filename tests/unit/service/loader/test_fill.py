"""What the loader writes is what safetensors reads, converted; its digest is of contents, not of files."""

from pathlib import Path

import pytest
import torch
from decoder_harness import load_weights
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model

from service.kernels.library import KernelPool, load
from service.loader import part_reader
from service.loader.checkpoint import CheckpointError, open_checkpoint
from service.loader.fill import fill
from service.models.config import parse_config
from service.models.native_weights import native_weights
from service.models.packing import Quantization, pack_plan
from service.models.weights import WeightPlan, plan_weights

DTYPES = ["float32", "bfloat16", "float16"]


def plan_of(model_dir: Path, dtype: str = "auto") -> WeightPlan:
    checkpoint = open_checkpoint(model_dir)
    return plan_weights(parse_config(checkpoint.config), checkpoint, dtype)


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("served", ["auto", *DTYPES])
def test_converted_and_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str, served: str
) -> None:
    monkeypatch.setattr(part_reader, "CHUNK_BYTES", 1000)
    model_dir = make_tiny_model(tmp_path, attention_bias=True, dtype=stored, num_hidden_layers=1)
    weights, _ = load_weights(model_dir, served, threads=3)
    file = load_file(model_dir / "model.safetensors")
    dtype = getattr(torch, stored if served == "auto" else served)
    parts = [file[f"model.layers.0.self_attn.{p}_proj.weight"] for p in "qkv"]
    assert torch.equal(weights["layers.0.attention.qkv.weight"], torch.cat(parts).to(dtype))
    biases = [file[f"model.layers.0.self_attn.{p}_proj.bias"] for p in "qkv"]
    assert torch.equal(weights["layers.0.attention.qkv.bias"], torch.cat(biases).to(dtype))
    assert torch.equal(weights["lm_head.weight"], file["lm_head.weight"].to(dtype))
    assert {tensor.dtype for tensor in weights.values()} == {dtype}


def test_digest_is_of_contents(tmp_path: Path) -> None:
    digests = [
        load_weights(make_tiny_model(tmp_path / name, seed=seed, max_shard_size=size), threads=threads)[1]
        for name, seed, size, threads in [("a", 0, "5GB", 1), ("b", 0, "100KB", 3), ("c", 1, "5GB", 1)]
    ]
    assert len(list((tmp_path / "b").glob("model-*.safetensors"))) > 2
    assert digests[0] == digests[1] != digests[2]
    as_bfloat16 = load_weights(tmp_path / "a", "bfloat16")[1]
    assert as_bfloat16 == digests[0]


def test_one_changed_bit_changes_the_digest(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path)
    before = load_weights(model_dir)[1]
    with (model_dir / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    assert load_weights(model_dir)[1] != before


def test_progress_adds_up_to_the_plan(tmp_path: Path) -> None:
    plan = plan_of(make_tiny_model(tmp_path), "bfloat16")
    seen: list[int] = []
    fill(plan, {t.name: memoryview(bytearray(t.nbytes)) for t in plan.tensors}, 4, seen.append)
    assert sum(seen) == plan.nbytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_file_that_shrinks_after_it_was_opened_is_an_error(tmp_path: Path, dtype: str) -> None:
    model_dir = make_tiny_model(tmp_path)
    plan = plan_of(model_dir, dtype)
    weights = model_dir / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: was truncated while tensor"):
        fill(plan, {t.name: memoryview(bytearray(t.nbytes)) for t in plan.tensors}, 2, lambda _: None)


def test_file_that_vanishes_is_an_error(tmp_path: Path) -> None:
    plan = plan_of(make_tiny_model(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read: No such file"):
        fill(plan, {t.name: memoryview(bytearray(t.nbytes)) for t in plan.tensors}, 2, lambda _: None)


def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, dtype="bfloat16")
    file = load_file(model_dir / "model.safetensors")
    file["model.norm.weight"][3] = 1e6
    save_file(file, model_dir / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has values that float16 cannot hold"):
        load_weights(model_dir, "float16")


@pytest.mark.parametrize("problem", ["too small", "read-only"])
def test_unfit_destination_is_refused(tmp_path: Path, problem: str) -> None:
    plan = plan_of(make_tiny_model(tmp_path))
    views = {t.name: memoryview(bytearray(t.nbytes)) for t in plan.tensors}
    name = "layers.0.mlp.down.weight"
    views[name] = views[name][1:] if problem == "too small" else views[name].toreadonly()
    with pytest.raises(ValueError, match=f"destination of {name}"):
        fill(plan, views, 1, lambda _: None)


FP8_BLOCK = (24, 40)


def random_scale(granularity: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale of that granularity, and the same with one number for each element."""
    shapes: dict[str, tuple[int, ...]] = {
        "tensor": (1,),
        "scalar": (),
        "row": (rows,),
        "row column": (rows, 1),
    }
    if granularity in shapes:
        scale = torch.rand(shapes[granularity]) + 0.5
        return scale, scale.reshape(-1, 1).expand(rows, columns)
    scale = torch.rand(-(-rows // FP8_BLOCK[0]), -(-columns // FP8_BLOCK[1])) + 0.5
    by_row = scale.repeat_interleave(FP8_BLOCK[0], 0)[:rows]
    return scale, by_row.repeat_interleave(FP8_BLOCK[1], 1)[:, :columns]


@pytest.mark.parametrize("granularity", ["tensor", "scalar", "row", "row column", "block"])
def test_fp8_becomes_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, granularity: str) -> None:
    monkeypatch.setattr(part_reader, "CHUNK_BYTES", 700)
    quantization: dict[str, object] = {"quant_method": "fp8", "activation_scheme": "static"}
    if granularity == "block":
        quantization["weight_block_size"] = list(FP8_BLOCK)
    model_dir = make_tiny_model(
        tmp_path, dtype="bfloat16", num_hidden_layers=1, quantization_config=quantization
    )
    file = load_file(model_dir / "model.safetensors")
    wanted = {}
    for name in [name for name in file if name.endswith("_proj.weight")]:
        scale, spread = random_scale(granularity, *file[name].shape)
        file[name] = (file[name].float() / spread).to(torch.float8_e4m3fn)
        wanted[name] = file[name].float() * spread
        file[name + ("_scale_inv" if granularity == "block" else "_scale")] = scale
        file[name.replace("weight", "input_scale")] = torch.ones(1)
    save_file(file, model_dir / "model.safetensors")
    weights, _ = load_weights(model_dir)
    for name in ("gate", "up"):
        half = weights["layers.0.mlp.gate_up.weight"].chunk(2)[name == "up"]
        assert torch.equal(half, wanted[f"model.layers.0.mlp.{name}_proj.weight"].bfloat16())
    assert weights["layers.0.mlp.gate_up.weight"].dtype == torch.bfloat16
    assert torch.equal(
        weights["layers.0.mlp.down.weight"], wanted["model.layers.0.mlp.down_proj.weight"].bfloat16()
    )
    assert plan_of(model_dir).dtype == "bfloat16"
    assert load_weights(model_dir, "float32")[0]["layers.0.mlp.down.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    "packing", [None, Quantization("int8", 0), Quantization("int8", 32), Quantization("int4", 32)]
)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_packed_as_the_kernels_pack_whole_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, packing: Quantization | None
) -> None:
    """Chunks, parts that share a panel and threads do not show."""
    monkeypatch.setattr(part_reader, "CHUNK_BYTES", 3000)
    model_dir = make_tiny_model(tmp_path, family, num_hidden_layers=1, dtype="bfloat16")
    plan = pack_plan(plan_of(model_dir), packing)
    views = {t.name: memoryview(bytearray(t.nbytes)) for t in plan.tensors}
    seen: list[int] = []
    digest = fill(plan, views, 3, seen.append)
    weights, plain_digest = load_weights(model_dir)
    library = load()
    assert library is not None
    pool = KernelPool(library, threads=1)
    packed = native_weights(plan.tensors, views)
    assert sum(seen) == plan.nbytes
    assert digest == plain_digest
    assert set(packed.matrices) | set(packed.experts) | set(packed.vectors) == set(weights)
    for tensor in plan.tensors:
        if not tensor.packing:
            assert torch.equal(packed.vectors[tensor.name], weights[tensor.name])
            continue
        matrices = weights[tensor.name].view(-1, *tensor.shape[-2:])
        stored = packed.experts.get(tensor.name) or (packed.matrices[tensor.name],)
        for matrix, own in zip(matrices, stored, strict=True):
            search = 12 if tensor.packing == "int4" else 0
            expected = pool.pack(matrix, tensor.packing, group=tensor.group, search=search)
            assert torch.equal(own.data, expected.data)
