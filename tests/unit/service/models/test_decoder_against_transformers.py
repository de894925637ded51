"""Logits of tiny random models of every family equal those of transformers, prompt and 40 decode steps."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_harness import Harness, load_decoder
from tiny_models import VOCAB_SIZE, make_tiny_model, tiny_model
from transformers import Qwen2ForCausalLM

pytestmark = pytest.mark.usefixtures("each_backend")

DECODED = 40
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
LONGROPE: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
    },
    "original_max_position_embeddings": 48,
}


def tokens(count: int) -> list[int]:
    return torch.randint(0, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(1)).tolist()


@torch.no_grad()
def reference(model: Any, token_ids: list[int], prompt: int) -> torch.Tensor:
    """transformers' logits of every position: the prompt at once, then token by token with its cache."""
    result = model(torch.tensor([token_ids[:prompt]]), use_cache=True)
    # transformers called it past_key_values up to 5.17 at least.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    logits, cache = [result.logits[0]], {name: result.past_key_values}
    for token in token_ids[prompt:]:
        logits.append(model(torch.tensor([[token]]), **cache, use_cache=True).logits[0])
    return torch.cat(logits)


def check(tmp_path: Path, family: str, prompt: int, **overrides: Any) -> None:
    token_ids = tokens(prompt + DECODED)
    expected = reference(tiny_model(family, **overrides), token_ids, prompt)
    harness = Harness(load_decoder(make_tiny_model(tmp_path, family, **overrides)))
    stream = harness.start(token_ids[:prompt])
    logits = torch.cat([harness.prefill(stream), harness.decode(stream, token_ids[prompt:])])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_key_value_heads": 1}),
    ("llama", {"num_key_value_heads": 2}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"hidden_size": 48, "head_dim": 16}),
    ("llama", {"attention_bias": True}),
    ("llama", {"mlp_bias": True}),
    ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 60, "head_dim": 10}),
    ("llama", {"hidden_act": "gelu"}),
    ("mistral", {}),
    ("mistral", {"sliding_window": 3}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 8}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    ("qwen3", {}),
    (
        "qwen3",
        {"attention_bias": True, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    ("smollm3", {}),
    ("smollm3", {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 24}),
    ("gemma2", {}),
    ("gemma3", {}),
    ("phi3", {}),
    ("phi3", {"sliding_window": 20}),
    ("phi3", {"partial_rotary_factor": 0.5}),
    ("olmo2", {}),
    ("granite", {}),
    ("granite", {"attention_bias": True, "mlp_bias": True}),
    ("mixtral", {}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [1], "decoder_sparse_step": 1}),
]


@pytest.mark.parametrize(
    ("family", "overrides"), CASES, ids=lambda value: value if isinstance(value, str) else str(value)
)
def test_family(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    check(tmp_path, family, 100, **overrides)


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("prompt", [20, 70], ids=["decodes past it", "starts past it"])
def test_rope_past_the_original_length(tmp_path: Path, kind: str, prompt: int) -> None:
    parameters = {**ROPES[kind], "rope_theta": 10000.0}
    check(tmp_path, "llama", prompt, rope_parameters=parameters, max_position_embeddings=32)


@pytest.mark.parametrize("prompt", [30, 70], ids=["decodes past it", "starts past it"])
def test_longrope_past_the_original_length(tmp_path: Path, prompt: int) -> None:
    check(tmp_path, "phi3", prompt, **LONGROPE)


@pytest.mark.parametrize("kind", ROPES)
def test_older_form_of_the_rope_gives_the_same(tmp_path: Path, kind: str) -> None:
    parameters = {**ROPES[kind], "rope_theta": 5000.0}
    make_tiny_model(tmp_path, rope_parameters=parameters, max_position_embeddings=32)
    newer = Harness(load_decoder(tmp_path))
    logits = newer.prefill(newer.start(tokens(50)))
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = {
        "type" if name == "rope_type" else name: value for name, value in scaling.items()
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    older = Harness(load_decoder(tmp_path))
    assert torch.equal(older.prefill(older.start(tokens(50))), logits)


@pytest.mark.parametrize("shards", ["5GB", "100KB"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_stored_dtypes_and_shards(tmp_path: Path, dtype: str, shards: str) -> None:
    """Narrow weights are widened exactly, so the reference is transformers in float32 over the same rounded weights."""
    make_tiny_model(tmp_path, "qwen2", dtype=dtype, max_shard_size=shards)
    model = Qwen2ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    harness = Harness(load_decoder(tmp_path))
    logits = harness.prefill(harness.start(tokens(30)))
    # Tile registers multiply bf16 weights with bf16 inputs.
    rounds = getattr(harness.decoder, "input_dtype", torch.float32) != torch.float32
    tolerance = 0.05 if rounds else 1e-4
    torch.testing.assert_close(logits, reference(model, tokens(30), 30), atol=tolerance, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_hidden_states_are_what_the_head_gets(tmp_path: Path, family: str) -> None:
    harness = Harness(load_decoder(make_tiny_model(tmp_path, family)))
    batch = harness.batch([(harness.start(tokens(30)), 30), (harness.start(tokens(11)), 11)])
    hidden = harness.decoder.hidden_states(batch, harness.cache)
    model = tiny_model(family).model
    for rows, count in ((hidden[:30], 30), (hidden[30:], 11)):
        with torch.no_grad():
            expected = model(torch.tensor([tokens(count)])).last_hidden_state[0]
        torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [(torch.bfloat16, 0.5), (torch.float16, 0.05)])
def test_narrow_cache_is_close(tmp_path: Path, kv_dtype: torch.dtype, tolerance: float) -> None:
    decoder = load_decoder(make_tiny_model(tmp_path))
    exact, narrow = Harness(decoder), Harness(decoder, kv_dtype=kv_dtype)
    logits = narrow.prefill(narrow.start(tokens(60)))
    torch.testing.assert_close(logits, exact.prefill(exact.start(tokens(60))), atol=tolerance, rtol=0)
