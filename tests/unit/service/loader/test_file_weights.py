"""Weights over the checkpoint's own files: the same model, the same digest, and a clear no where they do not fit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from decoder_harness import Harness, load_weights
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, make_tiny_model

from placement import numa
from placement.file_segment import FileSegment, open_segment
from placement.residency import VerdictKind
from service.loader import file_weights
from service.loader.as_stored import why_not_as_stored
from service.loader.checkpoint import CheckpointError, open_checkpoint
from service.loader.file_weights import SharedFiles, file_tensors, share_files
from service.models.config import parse_config
from service.models.decoder import Decoder
from service.models.weights import WeightPlan, plan_weights
from service.ops.torch_ops import TorchOps

NODES = numa.get_mempolicy(flags=numa.MPOL_F_MEMS_ALLOWED).nodes


def plan_of(model_dir: Path, dtype: str = "auto") -> WeightPlan:
    checkpoint = open_checkpoint(model_dir)
    return plan_weights(parse_config(checkpoint.config), checkpoint, dtype)


def share(model_dir: Path, progress: list[int] | None = None) -> SharedFiles:
    reports: list[int] = [] if progress is None else progress
    return share_files("node0", NODES, plan_of(model_dir), 2, reports.append)


def mapped(model_dir: Path) -> FileSegment:
    segment = open_segment(share(model_dir).fd)
    assert isinstance(segment, FileSegment)
    return segment


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_the_one_that_is_loaded(tmp_path: Path, family: str, dtype: str) -> None:
    model_dir = make_tiny_model(tmp_path, family, dtype=dtype, max_shard_size="100KB")
    loaded, digest = load_weights(model_dir)
    progress: list[int] = []
    shared = share(model_dir, progress)
    assert shared.manifest.digest == digest
    assert sum(progress) == plan_of(model_dir).nbytes
    segment = open_segment(shared.fd)
    assert isinstance(segment, FileSegment)
    assert len(segment.mappings) > 2
    config = parse_config(open_checkpoint(model_dir).config)
    prompt = list(range(3, 30))
    logits = []
    for weights in (loaded, file_tensors(segment)):
        harness = Harness(Decoder(config, weights, TorchOps()))
        logits.append(harness.prefill(harness.start(prompt)))
    torch.testing.assert_close(*logits)
    assert torch.equal(logits[0].argmax(-1), logits[1].argmax(-1))


def test_matrices_are_the_files_pages_and_biases_are_joined(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, "qwen2", dtype="bfloat16")
    segment, file = mapped(model_dir), load_file(model_dir / "model.safetensors")
    weights = file_tensors(segment)
    ranges = [(mapping.address, mapping.address + mapping.length) for mapping in segment.mappings]
    for name, parts in (("q_proj", 0), ("k_proj", 1), ("v_proj", 2)):
        part = weights["layers.0.attention.qkv.weight"][parts]
        assert torch.equal(part, file[f"model.layers.0.self_attn.{name}.weight"])
        assert any(first <= part.data_ptr() < last for first, last in ranges)
    biases = [file[f"model.layers.0.self_attn.{name}_proj.bias"] for name in "qkv"]
    assert torch.equal(weights["layers.0.attention.qkv.bias"], torch.cat(biases))


def test_the_verdict_counts_pages_and_claims_no_policy(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, dtype="bfloat16")
    shared = share(model_dir)
    size = (model_dir / "model.safetensors").stat().st_size
    assert shared.total_bytes == size
    assert sum(shared.residency.pages.values()) == -(-size // 4096)
    assert (shared.verdict.kind, shared.verdict.local) == (VerdictKind.UNBOUND, True)
    assert "in the page cache of the checkpoint, which no policy holds there" in shared.verdict.explanation


def test_a_file_that_changes_while_it_is_hashed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = make_tiny_model(tmp_path, dtype="bfloat16")
    settle = file_weights._settle

    def touch_first(*arguments):
        os.utime(model_dir / "model.safetensors", ns=(1, 1))
        return settle(*arguments)

    monkeypatch.setattr(file_weights, "_settle", touch_first)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: changed while it was loaded"):
        share(model_dir)


def test_a_file_that_is_cut_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, dtype="bfloat16")
    plan = plan_of(model_dir)
    os.truncate(model_dir / "model.safetensors", (model_dir / "model.safetensors").stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: was truncated while tensor"):
        share_files("node0", NODES, plan, 2, lambda _: None)


def test_files_as_they_are_need_no_conversion(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, dtype="bfloat16")
    assert why_not_as_stored(plan_of(model_dir), "auto") == ""
    assert why_not_as_stored(plan_of(model_dir, "bfloat16"), "bfloat16") == ""
    reason = why_not_as_stored(plan_of(model_dir, "float32"), "float32")
    assert reason.startswith(
        f"{model_dir / 'model.safetensors'}: tensor model.embed_tokens.weight is bfloat16"
    )
    assert reason.endswith("converted to float32 for --dtype float32")


def rewrite(model_dir: Path, change) -> None:
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_parts_of_different_types_cannot_stay_apart(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, dtype="bfloat16")
    name = "model.layers.1.self_attn.k_proj.weight"
    rewrite(model_dir, lambda tensors: tensors.update({name: tensors[name].half()}))
    reason = why_not_as_stored(plan_of(model_dir), "auto")
    assert "would be converted to float32 for layers.1.attention.qkv.weight with other parts" in reason


def test_fp8_is_refused_by_tensor(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, dtype="bfloat16")
    name = "model.layers.0.mlp.down_proj.weight"

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = torch.ones(1)

    rewrite(model_dir, quantize)
    assert f"tensor {name} is F8_E4M3, which must be converted" in why_not_as_stored(
        plan_of(model_dir), "auto"
    )


def test_a_tensor_off_its_alignment_is_refused(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, dtype="bfloat16")
    path = model_dir / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    # A header that is one byte longer, which the format allows.
    path.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    assert "which is no multiple of 2" in why_not_as_stored(plan_of(model_dir), "auto")
