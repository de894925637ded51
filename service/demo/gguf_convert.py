"""Converts a GGUF file of the llama architecture with a SmolLM tokenizer to a Hugging Face folder (bf16).

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Names of tensors and the order of rows are
those of llama.cpp's convert_hf_to_gguf.py, read backwards.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

# GGUF name to Hugging Face name, within a layer.
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class LlamaConfig:
    """The part of `config.json` that a GGUF file decides. Names are Hugging Face's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int | None


class Metadata:
    """The key-value part of a GGUF file, with errors that name the key."""

    def __init__(self, path: Path, reader: gguf.GGUFReader) -> None:
        self.path = path
        self.fields = reader.fields

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`; `default` where the file lacks it."""
        return self.fields[key].contents() if key in self.fields else default

    def require(self, key: str) -> Any:
        """The value of `key`. Raises ValueError where the file lacks it."""
        if key not in self.fields:
            raise ValueError(f"{self.path}: no key {key}")
        return self.fields[key].contents()

    def expect(self, key: str, supported: str) -> None:
        """Raise ValueError unless `key` has the one value that the converter knows."""
        found = self.require(key)
        if found != supported:
            raise ValueError(f"{self.path}: {key} is {found!r}; this converter knows {supported!r} only")


def convert_gguf(path: Path, folder: Path, progress: Callable[[int, int], None]) -> None:
    """Write `folder` from the GGUF file `path`; `progress` is called with tensors done and in all.

    Raises ValueError, naming file and key or tensor, for anything that the converter does not know.
    """
    reader = gguf.GGUFReader(path)
    metadata = Metadata(path, reader)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = read_config(metadata, set(tensors))
    names = tensor_names(config)
    _check_names(path, names, set(tensors))

    folder.mkdir(parents=True)
    _write_json(folder / "config.json", config_json(config))
    _write_json(folder / "generation_config.json", _token_ids(config))
    _write_json(folder / "tokenizer.json", tokenizer_json(metadata))
    _write_json(folder / "tokenizer_config.json", tokenizer_config_json(metadata, config))
    _write_json(folder / "special_tokens_map.json", _special_tokens(metadata, config))

    # GGUF lists the sizes of a tensor innermost first.
    shapes = {names[name]: tensors[name].shape.tolist()[::-1] for name in names}
    with (folder / "model.safetensors").open("wb") as file:
        file.write(safetensors_header(shapes))
        for done, (gguf_name, name) in enumerate(names.items(), start=1):
            tensor = tensors[gguf_name]
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            to_bfloat16(name, restore_row_order(gguf_name, values, config)).tofile(file)
            progress(done, len(names))


def safetensors_header(shapes: dict[str, list[int]]) -> bytes:
    """The head of a safetensors file of bf16 tensors that follow in this order, without gaps.

    Format: https://github.com/huggingface/safetensors#format. Tensors are written one by one behind it,
    so that one float32 tensor at a time is in memory.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_config(metadata: Metadata, tensor_names: set[str]) -> LlamaConfig:
    """Read the model's sizes. Embeddings are tied where the file holds no output matrix of its own."""
    metadata.expect("general.architecture", "llama")
    hidden_size = metadata.require("llama.embedding_length")
    heads = metadata.require("llama.attention.head_count")
    head_dim = metadata.get("llama.attention.key_length", hidden_size // heads)
    rotated = metadata.get("llama.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ValueError(
            f"{metadata.path}: llama.rope.dimension_count is {rotated}, not head size {head_dim}"
        )
    if "llama.rope.scaling.type" in metadata.fields:
        metadata.expect("llama.rope.scaling.type", "none")
    return LlamaConfig(
        vocab_size=len(metadata.require("tokenizer.ggml.tokens")),
        hidden_size=hidden_size,
        intermediate_size=metadata.require("llama.feed_forward_length"),
        num_hidden_layers=metadata.require("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=metadata.get("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=metadata.require("llama.context_length"),
        rope_theta=_shortest(metadata.get("llama.rope.freq_base", 10000.0)),
        rms_norm_eps=_shortest(metadata.require("llama.attention.layer_norm_rms_epsilon")),
        tie_word_embeddings="output.weight" not in tensor_names,
        bos_token_id=metadata.require("tokenizer.ggml.bos_token_id"),
        eos_token_id=metadata.require("tokenizer.ggml.eos_token_id"),
        pad_token_id=metadata.get("tokenizer.ggml.padding_token_id"),
    )


def tensor_names(config: LlamaConfig) -> dict[str, str]:
    """Every tensor that the model must have: GGUF name to Hugging Face name."""
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if not config.tie_word_embeddings:
        names["output.weight"] = "lm_head.weight"
    for layer in range(config.num_hidden_layers):
        for source, target in LAYER_TENSORS.items():
            names[f"blk.{layer}.{source}.weight"] = f"model.layers.{layer}.{target}.weight"
    return names


def _check_names(path: Path, expected: dict[str, str], found: set[str]) -> None:
    if missing := sorted(expected.keys() - found):
        raise ValueError(f"{path}: tensor {missing[0]} is missing ({len(missing)} in all)")
    if unknown := sorted(found - expected.keys()):
        raise ValueError(f"{path}: tensor {unknown[0]} is unknown to the converter ({len(unknown)} in all)")


def restore_row_order(
    gguf_name: str, values: npt.NDArray[np.float32], config: LlamaConfig
) -> npt.NDArray[np.float32]:
    """Put the rows of q and k back from interleaved pairs to rotated halves; other tensors pass as they are.

    `values` is [heads * head_dim, hidden_size]. llama.cpp turns neighbouring rows of a head, Hugging Face
    turns row i together with row i + head_dim / 2.
    """
    part = gguf_name.split(".")[-2]
    if part not in ("attn_q", "attn_k"):
        return values
    heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
    pairs = values.reshape(heads, config.head_dim // 2, 2, values.shape[-1])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def to_bfloat16(name: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round float32 to the nearest bfloat16, ties to even, as 16 bits. Raises ValueError where not finite."""
    if not np.isfinite(values).all():
        raise ValueError(f"tensor {name} holds values that are not finite")
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def config_json(config: LlamaConfig) -> dict[str, Any]:
    """The content of `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(config),
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
    }


def tokenizer_json(metadata: Metadata) -> dict[str, Any]:
    """The content of `tokenizer.json`: byte-level BPE that cuts digits apart first (llama.cpp's "smollm")."""
    metadata.expect("tokenizer.ggml.model", "gpt2")
    metadata.expect("tokenizer.ggml.pre", "smollm")
    tokens: list[str] = metadata.require("tokenizer.ggml.tokens")
    kinds: list[int] = metadata.require("tokenizer.ggml.token_type")
    if len(kinds) != len(tokens):
        raise ValueError(f"{metadata.path}: {len(kinds)} tokenizer.ggml.token_type for {len(tokens)} tokens")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    added_kinds = (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind == gguf.TokenType.CONTROL,
            }
            for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in added_kinds
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            # Tokens of other kinds pad the vocabulary and stand for no text.
            "vocab": {
                token: token_id
                for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
                if kind == gguf.TokenType.NORMAL or kind in added_kinds
            },
            "merges": [merge.split(" ") for merge in metadata.require("tokenizer.ggml.merges")],
        },
    }


def tokenizer_config_json(metadata: Metadata, config: LlamaConfig) -> dict[str, Any]:
    """The content of `tokenizer_config.json`. Raises ValueError where the file adds BOS to every prompt."""
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        raise ValueError(f"{metadata.path}: tokenizer.ggml.add_bos_token is set, which is not supported")
    return {
        # The generic class: it takes tokenizer.json as it stands and adds no pre-tokenizer of its own.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **_special_tokens(metadata, config),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position_embeddings,
        "chat_template": metadata.require("tokenizer.chat_template"),
    }


def _special_tokens(metadata: Metadata, config: LlamaConfig) -> dict[str, str]:
    tokens: list[str] = metadata.require("tokenizer.ggml.tokens")
    ids = {
        "bos_token": config.bos_token_id,
        "eos_token": config.eos_token_id,
        "unk_token": metadata.get("tokenizer.ggml.unknown_token_id"),
        "pad_token": config.pad_token_id,
    }
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}


def _token_ids(config: LlamaConfig) -> dict[str, Any]:
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32, as the checkpoint's author wrote it (1e-05)."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
