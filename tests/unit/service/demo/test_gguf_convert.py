from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from service.demo.gguf_convert import LAYER_TENSORS, convert_gguf, to_bfloat16

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "1 2"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def vocabulary() -> list[str]:
    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def llama_cpp_row_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


@dataclass
class TinyGguf:
    """A random model of transformers, written as llama.cpp would write it."""

    tied: bool = True
    keys: dict[str, Any] = field(default_factory=dict)
    left_out: str = ""
    added: str = ""

    def model(self) -> LlamaForCausalLM:
        config = LlamaConfig(
            vocab_size=len(vocabulary()),
            hidden_size=48,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=64,
            rope_theta=5000.0,
            rms_norm_eps=1e-5,
            tie_word_embeddings=self.tied,
        )
        torch.manual_seed(1)
        model = LlamaForCausalLM(config).eval()
        for weight in model.parameters():
            # Values that bf16 holds exactly, so that weights must come back bit for bit.
            weight.data = weight.data.bfloat16().float()
        return model

    def tensors(self) -> dict[str, np.ndarray]:
        model = self.model()
        weights = {name: value.numpy() for name, value in model.state_dict().items()}
        tensors = {
            "token_embd.weight": weights["model.embed_tokens.weight"],
            "output_norm.weight": weights["model.norm.weight"],
        }
        if not self.tied:
            tensors["output.weight"] = weights["lm_head.weight"]
        for layer in range(model.config.num_hidden_layers):
            for name, hub_name in LAYER_TENSORS.items():
                tensors[f"blk.{layer}.{name}.weight"] = weights[f"model.layers.{layer}.{hub_name}.weight"]
            for name, heads in (("attn_q", 4), ("attn_k", 2)):
                key = f"blk.{layer}.{name}.weight"
                tensors[key] = llama_cpp_row_order(tensors[key], heads)
        if self.added:
            tensors[self.added] = np.zeros((2, 2), np.float32)
        tensors.pop(self.left_out, None)
        return tensors

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.keys.get("general.architecture", "llama"))
        tokens = vocabulary()
        control = int(gguf.TokenType.CONTROL)
        values = {
            "llama.embedding_length": 48,
            "llama.feed_forward_length": 64,
            "llama.block_count": 2,
            "llama.context_length": 64,
            "llama.attention.head_count": 4,
            "llama.attention.head_count_kv": 2,
            "llama.attention.key_length": 16,
            "llama.rope.freq_base": 5000.0,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [control] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.padding_token_id": 2,
            "tokenizer.chat_template": TEMPLATE,
        }
        values.update({key: value for key, value in self.keys.items() if key != "general.architecture"})
        for key, value in values.items():
            if value is None:
                continue
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        for name, tensor in self.tensors().items():
            writer.add_tensor(name, np.ascontiguousarray(tensor, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def convert(tiny: TinyGguf, tmp_path: Path) -> Path:
    convert_gguf(tiny.write(tmp_path / "tiny.gguf"), tmp_path / "folder", progress=lambda *_: None)
    return tmp_path / "folder"


@pytest.mark.parametrize("tied", [True, False])
def test_weights_come_back_bit_for_bit(tmp_path: Path, tied: bool) -> None:
    tiny = TinyGguf(tied=tied)
    found = load_file(convert(tiny, tmp_path) / "model.safetensors")
    expected = dict(tiny.model().state_dict())
    if tied:
        del expected["lm_head.weight"]
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name].float(), weight), name


@pytest.mark.parametrize("tied", [True, False])
def test_converted_folder_gives_the_same_logits_in_transformers(tmp_path: Path, tied: bool) -> None:
    tiny = TinyGguf(tied=tied)
    converted = AutoModelForCausalLM.from_pretrained(convert(tiny, tmp_path), dtype=torch.float32)
    tokens = torch.arange(3, 23).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(converted(tokens).logits, tiny.model()(tokens).logits, rtol=0, atol=1e-6)


def test_sizes_and_ids_reach_the_config(tmp_path: Path) -> None:
    folder = convert(TinyGguf(), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert (config["head_dim"], config["rope_theta"], config["rms_norm_eps"]) == (16, 5000.0, 1e-5)
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("hello", ["hello"]),
        ("hello world", ["hello", "Ġwo", "r", "l", "d"]),
        # Digits stand alone, although the vocabulary has a merge for them.
        ("12", ["1", "2"]),
        ("hello<|im_end|>hello", ["hello", "<|im_end|>", "hello"]),
        ("a\n é", ["a", "Ċ", "Ġ", "Ã", "©"]),
    ],
)
def test_tokenizer_cuts_text_as_the_checkpoint_does(tmp_path: Path, text: str, tokens: list[str]) -> None:
    folder = convert(TinyGguf(), tmp_path)
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = plain.encode(text)
    assert encoded.tokens == tokens
    assert plain.decode(encoded.ids, skip_special_tokens=False) == text
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == encoded.ids


def test_chat_template_and_special_tokens_are_kept(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(convert(TinyGguf(), tmp_path))
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert rendered == "<|im_start|>user\nhello<|im_end|>\n"
    special = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token]
    assert special == ["<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>"]


@pytest.mark.parametrize(
    ("tiny", "message"),
    [
        (TinyGguf(keys={"general.architecture": "qwen2"}), "general.architecture is 'qwen2'"),
        (TinyGguf(keys={"llama.block_count": None}), "no key llama.block_count"),
        (TinyGguf(keys={"llama.rope.dimension_count": 8}), "llama.rope.dimension_count is 8"),
        (TinyGguf(keys={"llama.rope.scaling.type": "yarn"}), "llama.rope.scaling.type is 'yarn'"),
        (TinyGguf(keys={"tokenizer.ggml.pre": "llama-bpe"}), "tokenizer.ggml.pre is 'llama-bpe'"),
        (TinyGguf(keys={"tokenizer.ggml.token_type": [1, 1]}), "2 tokenizer.ggml.token_type"),
        (TinyGguf(keys={"tokenizer.ggml.add_bos_token": True}), "add_bos_token is set"),
        (TinyGguf(left_out="blk.1.ffn_up.weight"), "tensor blk.1.ffn_up.weight is missing"),
        (TinyGguf(added="blk.1.attn_q.bias"), "tensor blk.1.attn_q.bias is unknown"),
    ],
)
def test_what_the_converter_does_not_know_is_refused(tmp_path: Path, tiny: TinyGguf, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert(tiny, tmp_path)


def test_rounding_to_bfloat16_is_that_of_torch() -> None:
    generator = np.random.default_rng(0)
    values = generator.standard_normal(10_000, dtype=np.float32) * np.float32(1e3)
    ties = (np.arange(1 << 15, dtype=np.uint32) << 16 | 0x8000)[:0x7F00].view(np.float32)
    everything = np.concatenate([values, ties, -ties, np.float32([0.0, -0.0])])
    expected = torch.from_numpy(everything).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(to_bfloat16("x", everything), expected)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="tensor x holds values that are not finite"):
        to_bfloat16("x", np.array([1.0, value], np.float32))
