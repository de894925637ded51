"""Tensors of integers that do not fit together are refused by file and name, before anything serves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import (
    FORMATS,
    Format,
    edit_config,
    gptq_format,
    make_quantized_model,
    write_tensors,
)
from safetensors.torch import load_file

from service import backends
from service.loader.checkpoint import CheckpointError, open_checkpoint
from service.loader.fill import fill
from service.loader.model_size import measure
from service.models import integers
from service.models.config import ConfigError, parse_config
from service.models.packing import Quantization, pack_plan
from service.models.weights import WeightPlan, plan_weights

Tensors = dict[str, torch.Tensor]
Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"


def plan_of(model_dir: Path) -> WeightPlan:
    checkpoint = open_checkpoint(model_dir)
    return plan_weights(parse_config(checkpoint.config), checkpoint)


def changed(directory: Path, format: Format, edit: Callable[[Tensors], Any]) -> Path:
    model_dir, _, _ = make_quantized_model(directory, format, num_hidden_layers=1)
    tensors = load_file(model_dir / "model.safetensors")
    edit(tensors)
    write_tensors(model_dir, {name: tensor.contiguous() for name, tensor in tensors.items()})
    return model_dir


def drop(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def put(name: str, make: Callable[[Tensors], torch.Tensor]) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: make(tensors)})


REFUSED: dict[str, tuple[str, Callable[[Tensors], Any], str]] = {
    "no scales": ("gptq 4 sym", drop(f"{Q}.scales"), f"tensor {Q}.qweight has no {Q}.scales"),
    "no zero points": ("awq", drop(f"{Q}.qzeros"), f"tensor {Q}.qweight has no {Q}.qzeros"),
    "no scale": ("packed 4", drop(f"{Q}.weight_scale"), f"tensor {Q}.weight_packed has no {Q}.weight_scale"),
    "no scale of int8": ("w8a8", drop(f"{Q}.weight_scale"), f"tensor {Q}.weight has no {Q}.weight_scale"),
    "no values": ("awq", drop(f"{Q}.qweight"), f"tensor {Q}.weight is missing"),
    "other groups": (
        "gptq 4 sym",
        put(f"{DOWN}.scales", lambda t: t[f"{DOWN}.scales"][:2]),
        rf"tensor {DOWN}.scales has shape \[2, 64\], .* one scale for every 32 columns of \[64, 96\]",
    ),
    "scales for rows": (
        "packed 8",
        put(f"{Q}.weight_scale", lambda _: torch.ones(32, 1)),
        rf"tensor {Q}.weight_scale has shape \[32, 1\], .* one scale for every row of \[64, 64\]",
    ),
    "three bits": (
        "gptq 4 sym",
        put(f"{Q}.qweight", lambda _: torch.zeros(6, 64, dtype=torch.int32)),
        rf"tensor {Q}.qweight has shape \[6, 64\]; of a matrix \[64, 64\] config.json asks for \[8, 64\]",
    ),
    "zero points of another shape": (
        "awq",
        put(f"{Q}.qzeros", lambda _: torch.zeros(2, 7, dtype=torch.int32)),
        rf"tensor {Q}.qzeros has shape \[2, 7\], {Q}.qweight asks for \[2, 8\]",
    ),
    "words of other widths": (
        "gptq 4 sym",
        put(f"{Q}.qweight", lambda t: t[f"{Q}.qweight"].long()),
        rf"tensor {Q}.qweight has dtype I64, which is not I32",
    ),
    "scales that are integers": (
        "awq",
        put(f"{Q}.scales", lambda t: t[f"{Q}.scales"].int()),
        rf"tensor {Q}.scales has dtype I32, which is not F16 or BF16 or F32",
    ),
    "columns in order of activation": (
        "gptq 4 sym",
        put(f"{Q}.g_idx", lambda t: t[f"{Q}.g_idx"].flip(0)),
        rf"tensor {Q}.g_idx does not go up by one every 32 columns: .* \(desc_act, actorder\) are not supported",
    ),
    "a group index of another length": (
        "gptq 4 sym",
        put(f"{Q}.g_idx", lambda t: t[f"{Q}.g_idx"][:-1]),
        rf"tensor {Q}.g_idx has shape \[63\], {Q}.qweight asks for \[64\]",
    ),
    "columns in order of activation, compressed": (
        "packed 4",
        put(f"{Q}.weight_g_idx", lambda _: torch.randperm(64).int() // 32),
        rf"tensor {Q}.weight_g_idx does not go up by one every 32 columns",
    ),
    "another stated shape": (
        "packed 4",
        put(f"{Q}.weight_shape", lambda _: torch.tensor([64, 63])),
        rf"tensor {Q}.weight_shape says \[64, 63\], config.json asks for \[64, 64\]",
    ),
    "a part that is not rounded": (
        "gptq 4 sym",
        lambda t: (
            [t.pop(f"{Q}.{kind}") for kind in ("qweight", "qzeros", "scales", "g_idx")]
            + [t.update({f"{Q}.weight": torch.zeros(64, 64).half()})]
        ),
        rf"k_proj.qweight \(4 bits, 32 columns .* and tensor {Q}.weight \(F16\) are joined in "
        r"layers.0.attention.qkv.weight: they must agree",
    ),
    "a weight beside its integers": (
        "awq",
        put(f"{Q}.weight", lambda _: torch.zeros(64, 64)),
        f"1 unexpected tensors for a llama model: {Q}.weight",
    ),
    "a bias that the model has not": (
        "gptq 4 sym",
        put(f"{Q}.bias", lambda _: torch.ones(64)),
        f"1 unexpected tensors for a llama model: {Q}.bias",
    ),
}


@pytest.mark.parametrize(("format", "edit", "problem"), REFUSED.values(), ids=REFUSED)
def test_refused_by_file_and_name(
    tmp_path: Path, format: str, edit: Callable[[Tensors], Any], problem: str
) -> None:
    model_dir = changed(tmp_path, FORMATS[format], edit)
    with pytest.raises(CheckpointError, match=problem) as caught:
        plan_of(model_dir)
    assert str(caught.value).startswith(str(model_dir))


def test_parts_of_other_bits_or_groups_are_not_joined(tmp_path: Path) -> None:
    dynamic = {f"+:{Q}".replace(".", r"\."): {"group_size": 16}}
    model_dir = changed(tmp_path, gptq_format(4, 32, True, dynamic=dynamic), put_sixteens)
    with pytest.raises(
        CheckpointError, match=r"k_proj.* 32 columns .*q_proj.* 16 columns .* they must agree"
    ):
        plan_of(model_dir)


def put_sixteens(tensors: Tensors) -> None:
    tensors[f"{Q}.scales"] = torch.ones(4, 64).half()
    tensors[f"{Q}.qzeros"] = torch.zeros(4, 8, dtype=torch.int32)
    tensors[f"{Q}.g_idx"] = torch.arange(64, dtype=torch.int32) // 16


def test_integers_without_a_word_in_config_json(tmp_path: Path) -> None:
    model_dir, _, _ = make_quantized_model(tmp_path, FORMATS["awq"], num_hidden_layers=1)
    edit_config(model_dir, quantization_config=None)
    with pytest.raises(
        CheckpointError, match=rf"{Q}.weight is missing; {Q}.qweight is there, but config.json has no"
    ):
        plan_of(model_dir)


def test_a_missing_group_index_is_columns_in_order(tmp_path: Path) -> None:
    def drop_all(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("g_idx")]:
            del tensors[name]

    model_dir = changed(tmp_path, FORMATS["gptq 4 sym"], drop_all)
    assert plan_of(model_dir).integers == "gptq"
    edit_config(model_dir, quantization_config={**FORMATS["gptq 4 sym"].config, "desc_act": True})
    with pytest.raises(CheckpointError, match=rf"{Q}.qweight has no {Q}.g_idx, and desc_act is true"):
        plan_of(model_dir)


def test_order_of_activation_with_one_group_to_a_row_is_served(tmp_path: Path) -> None:
    format = gptq_format(4, 0, True, desc_act=True)
    assert plan_of(changed(tmp_path, format, lambda _: None)).integers == "gptq"


def test_scales_of_activations_and_of_the_cache_are_left_out(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        for kind in ("input_scale", "input_zero_point", "k_scale"):
            tensors[f"{Q}.{kind}"] = torch.ones(1)

    assert plan_of(changed(tmp_path, FORMATS["w8a8"], add)).integers == "compressed-tensors"


@pytest.mark.parametrize("format", ["gptq 8", "packed 8", "w8a8"])
def test_eight_bits_with_other_zero_points_are_refused(tmp_path: Path, format: str) -> None:
    """By what the file holds, whatever config.json says of it."""
    names = {"gptq 8": "qzeros", "packed 8": "weight_zero_point", "w8a8": "weight_zero_point"}
    zeros = {
        "gptq 8": torch.zeros(2, 16, dtype=torch.int32),
        "packed 8": torch.zeros(16, 1, dtype=torch.int32),
        "w8a8": torch.ones(64, 1, dtype=torch.int8),
    }
    name = f"{Q}.{names[format]}"
    model_dir = changed(tmp_path, FORMATS[format], put(name, lambda _: zeros[format]))
    plan = pack_plan(plan_of(model_dir))
    with pytest.raises(CheckpointError, match=rf"tensor {name} has values other than (128|0): the kernels"):
        fill(plan, {t.name: memoryview(bytearray(t.nbytes)) for t in plan.tensors}, 1, lambda _: None)


def test_file_that_is_cut_after_it_was_opened(tmp_path: Path) -> None:
    model_dir, _, _ = make_quantized_model(tmp_path, FORMATS["awq"], num_hidden_layers=1)
    plan = pack_plan(plan_of(model_dir))
    weights = model_dir / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: was truncated while tensor"):
        fill(plan, {t.name: memoryview(bytearray(t.nbytes)) for t in plan.tensors}, 2, lambda _: None)


def test_group_index_of_a_file_that_is_cut(tmp_path: Path) -> None:
    model_dir, _, _ = make_quantized_model(tmp_path, FORMATS["gptq 4 sym"], num_hidden_layers=1)
    checkpoint = open_checkpoint(model_dir)
    (model_dir / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"was truncated while tensor .*g_idx was read"):
        plan_weights(parse_config(checkpoint.config), checkpoint)


def test_torch_refuses_integers_by_flag_and_says_why_it_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir, plain, _ = make_quantized_model(tmp_path, FORMATS["gptq 4 sym"], num_hidden_layers=1)
    problem = "quant_method: 'gptq' weights of integers are read by --backend cpu alone, not by torch"
    monkeypatch.setattr(backends, "why_unusable", lambda: None)
    with pytest.raises(ConfigError, match=f"{problem}$"):
        measure(model_dir, backend="torch")
    monkeypatch.setattr(backends, "why_unusable", lambda: "native CPU kernels were not built")
    with pytest.raises(ConfigError, match=f"{problem}: native CPU kernels were not built$"):
        measure(model_dir, backend="torch")
    assert measure(plain, backend="torch").dtype == "float32"


def test_sizes_are_those_of_the_integers(tmp_path: Path) -> None:
    model_dir, plain, integers_of = make_quantized_model(tmp_path, FORMATS["awq"])
    sizes, floats = measure(model_dir, backend="cpu"), measure(plain, "float16", backend="cpu")
    rounded = sum(each.values.numel() for each in integers_of.values())
    assert sizes.parameters == floats.parameters
    saved = floats.weights_bytes - sizes.weights_bytes
    # Four bits, and in each group of 32 a scale of four bytes and a zero point of one.
    assert saved == pytest.approx(rounded * (2 - 0.5 - 5 / 32), rel=0.02)
    assert sizes.kv_dtype == "float16"


def test_quantize_rounds_what_the_checkpoint_does_not(tmp_path: Path) -> None:
    model_dir, _, _ = make_quantized_model(tmp_path, FORMATS["awq"], num_hidden_layers=1)
    plan = pack_plan(plan_of(model_dir), Quantization("int8", 0))
    packing = {tensor.name: (tensor.packing, tensor.group) for tensor in plan.tensors}
    assert packing["layers.0.mlp.down.weight"] == ("int4", 32)
    assert packing["lm_head.weight"] == packing["embed_tokens.weight"] == ("int8", 0)


def test_order_of_groups_is_made_once_for_each_size() -> None:
    integers._groups_in_order.cache_clear()
    assert integers._groups_in_order(8, 4) == b"\0\0\0\0" * 4 + b"\1\0\0\0" * 4
    integers._groups_in_order(8, 4)
    assert integers._groups_in_order.cache_info().hits == 1
