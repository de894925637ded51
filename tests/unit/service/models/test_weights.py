"""Every tensor of a checkpoint is accounted for: missing, unexpected and misshapen ones are refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_harness import Harness, load_decoder
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model

from service.loader.checkpoint import CheckpointError, open_checkpoint
from service.models.config import parse_config
from service.models.weights import WeightPlan, plan_weights

Tensors = dict[str, torch.Tensor]


def plan_of(model_dir: Path, dtype: str = "auto") -> WeightPlan:
    checkpoint = open_checkpoint(model_dir)
    return plan_weights(parse_config(checkpoint.config), checkpoint, dtype)


def change(model_dir: Path, edit: Callable[[Tensors], Any], **config: Any) -> Path:
    """Rewrites the weights file after `edit`, and config.json with `config`."""
    tensors = load_file(model_dir / "model.safetensors")
    edit(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, model_dir / "model.safetensors"
    )
    path = model_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return model_dir


EDITS: dict[str, tuple[str, Callable[[Tensors], Any], str]] = {
    "missing": (
        "llama",
        lambda t: t.pop("model.layers.2.mlp.up_proj.weight"),
        "tensor model.layers.2.mlp.up_proj.weight is missing",
    ),
    "missing norm": (
        "qwen3",
        lambda t: t.pop("model.layers.0.self_attn.q_norm.weight"),
        "q_norm.weight is missing",
    ),
    "missing bias": (
        "qwen2",
        lambda t: t.pop("model.layers.1.self_attn.k_proj.bias"),
        "k_proj.bias is missing",
    ),
    "missing expert": (
        "mixtral",
        lambda t: t.pop("model.layers.1.block_sparse_moe.experts.3.w2.weight"),
        "experts.3.w2.weight is missing",
    ),
    "one layer too many": (
        "llama",
        lambda t: t.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(1)}),
        "1 unexpected tensors for a llama model: model.layers.9.mlp.up_proj.weight",
    ),
    "stray bias": (
        "llama",
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}),
        "unexpected tensors for a llama model: model.layers.0.self_attn.q_proj.bias",
    ),
    "norms of another family": (
        "llama",
        lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.zeros(16)}),
        "unexpected",
    ),
    "adapter": (
        "llama",
        lambda t: t.update({"base_model.lora_A.weight": torch.zeros(2, 2)}),
        "base_model.lora_A",
    ),
    "shape": (
        "llama",
        lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(64, 64)}),
        "k_proj.weight has shape [64, 64], config.json asks for [32, 64]",
    ),
    "vocabulary": (
        "llama",
        lambda t: t.update({"model.embed_tokens.weight": torch.zeros(385, 64)}),
        "embed_tokens.weight has shape [385, 64], config.json asks for [384, 64]",
    ),
    "integers": (
        "llama",
        lambda t: t.update({"model.layers.0.mlp.down_proj.weight": torch.zeros(64, 96, dtype=torch.int8)}),
        "down_proj.weight has dtype I8, which cannot be served",
    ),
    "fp8 without a scale": (
        "llama",
        lambda t: t.update(
            {"model.layers.0.mlp.down_proj.weight": torch.zeros(64, 96, dtype=torch.float8_e4m3fn)}
        ),
        "down_proj.weight is F8_E4M3 and has no model.layers.0.mlp.down_proj.weight_scale",
    ),
    "fp8 with a scale that fits nothing": (
        "llama",
        lambda t: t.update(
            {
                "model.layers.0.mlp.down_proj.weight": torch.zeros(64, 96, dtype=torch.float8_e4m3fn),
                "model.layers.0.mlp.down_proj.weight_scale": torch.ones(3),
            }
        ),
        "weight_scale has shape [3], which fits no scale",
    ),
}


@pytest.mark.parametrize(("family", "edit", "problem"), EDITS.values(), ids=EDITS)
def test_misfit_is_named(tmp_path: Path, family: str, edit: Callable[[Tensors], Any], problem: str) -> None:
    model_dir = change(make_tiny_model(tmp_path, family), edit)
    with pytest.raises(CheckpointError) as caught:
        plan_of(model_dir)
    assert problem in str(caught.value)


def test_known_buffers_are_left_out(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path)
    before = plan_of(model_dir).tensors
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(8) for i in range(4)}
    assert [t.name for t in plan_of(change(model_dir, lambda t: t.update(buffers))).tensors] == [
        t.name for t in before
    ]


def logits_of(model_dir: Path) -> torch.Tensor:
    harness = Harness(load_decoder(model_dir))
    return harness.prefill(harness.start([5, 6, 7]))


def test_tied_and_no_head_in_the_file(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, tie_word_embeddings=True)
    plan = plan_of(model_dir)
    assert plan.tied
    assert "lm_head.weight" not in [tensor.name for tensor in plan.tensors]


def test_tied_and_an_equal_head_in_the_file_is_stored_once(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, tie_word_embeddings=True)
    before, nbytes = logits_of(model_dir), plan_of(model_dir).nbytes
    change(model_dir, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert plan_of(model_dir).nbytes == nbytes
    assert torch.equal(logits_of(model_dir), before)


def test_tied_but_another_head_in_the_file_is_used(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, tie_word_embeddings=True)
    before = logits_of(model_dir)
    change(model_dir, lambda t: t.update({"lm_head.weight": -t["model.embed_tokens.weight"]}))
    assert not plan_of(model_dir).tied
    torch.testing.assert_close(logits_of(model_dir), -before)


def test_untied_with_a_head(tmp_path: Path) -> None:
    assert not plan_of(make_tiny_model(tmp_path)).tied


def test_untied_without_a_head_is_refused(tmp_path: Path) -> None:
    model_dir = change(make_tiny_model(tmp_path), lambda t: t.pop("lm_head.weight"))
    with pytest.raises(
        CheckpointError, match=r"tensor lm_head\.weight is missing, and tie_word_embeddings is false"
    ):
        plan_of(model_dir)


def test_flag_is_not_inferred_from_equal_tensors(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path)
    change(model_dir, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert not plan_of(model_dir).tied


def test_names_without_the_model_prefix(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, tie_word_embeddings=True)
    before = logits_of(model_dir)

    def strip(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    assert torch.equal(logits_of(change(model_dir, strip)), before)


def test_mixed_dtypes_keep_their_own(tmp_path: Path) -> None:
    model_dir = make_tiny_model(tmp_path, dtype="bfloat16", attention_bias=True)
    name = "model.layers.0.self_attn.q_proj.bias"
    change(
        model_dir,
        lambda t: t.update({name: t[name].float(), "model.norm.weight": t["model.norm.weight"].float()}),
    )
    plan = plan_of(model_dir)
    float32 = [tensor.name for tensor in plan.tensors if tensor.dtype == "float32"]
    assert float32 == ["layers.0.attention.qkv.bias", "final_norm.weight"]
    assert plan.dtype == "bfloat16"
    assert {tensor.dtype for tensor in plan_of(model_dir, "float16").tensors} == {"float16"}
