"""Writes a large model of random weights for measurements: the time that loading takes does not depend on their values."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

_HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS = 2048, 8192, 32, 8
_HEAD_DIM = _HIDDEN // _HEADS
# Elements of one block of noise, repeated to fill every tensor.
_NOISE = 1 << 22


def _layer(index: int, fill: torch.Tensor) -> dict[str, torch.Tensor]:
    shapes = {
        "self_attn.q_proj": (_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.k_proj": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.v_proj": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD_DIM),
        "mlp.gate_proj": (_INTERMEDIATE, _HIDDEN),
        "mlp.up_proj": (_INTERMEDIATE, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _INTERMEDIATE),
    }
    tensors = {f"model.layers.{index}.{name}.weight": _filled(shape, fill) for name, shape in shapes.items()}
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"model.layers.{index}.{name}.weight"] = torch.ones(_HIDDEN, dtype=torch.bfloat16)
    return tensors


def _filled(shape: tuple[int, int], fill: torch.Tensor) -> torch.Tensor:
    elements = shape[0] * shape[1]
    return fill.repeat(-(-elements // len(fill)))[:elements].view(shape).clone()


def make_generated_model(directory: Path, gigabytes: float, tokenizer_of: Path) -> Path:
    """A Llama of about so many GB (10^9 bytes) in bfloat16, with the tokenizer of another model folder.

    A folder that is whole already is left as it is. Returns `directory`.
    """
    if (directory / "config.json").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    vocab_size = json.loads((tokenizer_of / "config.json").read_text())["vocab_size"]
    per_layer = 2 * (2 * _HIDDEN * (_HEADS + _KV_HEADS) * _HEAD_DIM + 3 * _HIDDEN * _INTERMEDIATE)
    layers = max(1, round((gigabytes * 1e9 - 2 * vocab_size * _HIDDEN) / per_layer))
    fill = (torch.randn(_NOISE, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    weight_map: dict[str, str] = {}
    for number in range(layers + 1):
        tensors = (
            {
                "model.embed_tokens.weight": _filled((vocab_size, _HIDDEN), fill),
                "model.norm.weight": torch.ones(_HIDDEN, dtype=torch.bfloat16),
            }
            if number == layers
            else _layer(number, fill)
        )
        name = f"model-{number:05}.safetensors"
        save_file(tensors, directory / name)
        weight_map |= dict.fromkeys(tensors, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (tokenizer_of / name).exists():
            shutil.copy(tokenizer_of / name, directory / name)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "num_hidden_layers": layers,
        "vocab_size": vocab_size,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    # Last, since it says that the folder is whole.
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return directory
