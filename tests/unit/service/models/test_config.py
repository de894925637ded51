"""config.json of every family comes into one form; what is not supported is refused by its key."""

import math
from typing import Any

import pytest

from service.models.config import ConfigError, ModelConfig, parse_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
}
CLASS_NAMES = {
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "granite": "GraniteForCausalLM",
}


def parse(model_type: str = "llama", **changes: Any) -> ModelConfig:
    architecture = CLASS_NAMES.get(model_type, "LlamaForCausalLM")
    return parse_config({**LLAMA, "model_type": model_type, "architectures": [architecture], **changes})


def windows(model_type: str, **changes: Any) -> list[int | None]:
    return [layer.window for layer in parse(model_type, **changes).layers]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gpt5"),
        ("architectures", ["LlamaForSequenceClassification"]),
        ("architectures", "LlamaForCausalLM"),
        ("hidden_act", "sigmoid"),
        ("hidden_act", ["silu"]),
        ("hidden_size", 0),
        ("hidden_size", "64"),
        ("hidden_size", 63),
        ("hidden_size", None),
        ("vocab_size", 1.5),
        ("num_hidden_layers", True),
        ("num_key_value_heads", 3),
        ("rms_norm_eps", -1),
        ("rms_norm_eps", "1e-5"),
        ("rope_theta", 0),
        ("tie_word_embeddings", "yes"),
        ("attention_bias", 1),
        ("eos_token_id", "</s>"),
        ("eos_token_id", [1, None]),
        ("rope_scaling", "linear"),
        ("partial_rotary_factor", 2.0),
    ],
)
def test_bad_value_is_named(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^config\.json: {key}: ") as caught:
        parse_config({**LLAMA, key: value})
    assert caught.value.key == key


def test_family_is_found_by_architecture_alone() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "model_type"}
    assert parse_config(config).model_type == "llama"
    with pytest.raises(ConfigError, match="architectures: unknown architecture"):
        parse_config({**config, "architectures": ["NewForCausalLM"]})


def test_head_size_is_independent_of_the_hidden_size() -> None:
    assert parse(hidden_size=48, head_dim=16).head_dim == 16
    assert parse(hidden_size=50, head_dim=16).head_dim == 16
    assert parse("qwen3").head_dim == 128
    assert parse(head_dim=None).head_dim == 16


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("holder", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("parameters", "context"),
    [
        ({"kind": "default"}, 1024),
        ({"kind": "linear", "factor": 2.0}, 2048),
        ({"kind": "dynamic", "factor": 4.0}, 4096),
        ({"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        (
            {
                "kind": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
            1024,
        ),
        (
            {"kind": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
            1024,
        ),
    ],
)
def test_rope_in_each_form(key: str, holder: str, parameters: dict[str, Any], context: int) -> None:
    values = {key if name == "kind" else name: value for name, value in parameters.items()}
    if holder == "rope_parameters":
        config = parse(rope_parameters={**values, "rope_theta": 5000.0}, rope_theta=1.0)
    else:
        config = parse(rope_scaling=values, rope_theta=5000.0)
    rope = config.layers[0].rope
    assert rope is not None
    assert (rope.kind, rope.theta, rope.rotary_dim) == (parameters["kind"], 5000.0, 16)
    assert rope.factor == parameters.get("factor", 1.0)
    assert config.context_length == context
    assert (config.length_dependent_from is not None) == (parameters["kind"] in ("dynamic", "longrope"))


@pytest.mark.parametrize(
    ("parameters", "key"),
    [
        ({"rope_type": "spiral", "factor": 2.0}, "rope_type"),
        ({"type": "mrope"}, "rope_type"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "linear", "factor": True}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "high_freq_factor",
        ),
        ({"rope_type": "longrope", "short_factor": [1.0] * 8}, "long_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0] * 7, "long_factor": [1.0] * 8}, "short_factor"),
    ],
)
@pytest.mark.parametrize("holder", ["rope_scaling", "rope_parameters"])
def test_bad_rope_is_named(parameters: dict[str, Any], key: str, holder: str) -> None:
    with pytest.raises(ConfigError, match=rf"^config\.json: {holder}\.{key}: "):
        parse(**{holder: parameters})


def test_null_rope_scaling_is_none() -> None:
    rope = parse(rope_scaling=None).layers[0].rope
    assert rope is not None
    assert rope.kind == "default"


def test_gemma3_has_a_local_and_a_global_rope_in_both_forms() -> None:
    older = parse(
        "gemma3_text",
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window_pattern=2,
    )
    newer = parse(
        "gemma3_text",
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        sliding_window_pattern=2,
    )
    assert older.layers == newer.layers
    local, everywhere = older.layers[0], older.layers[1]
    assert local.rope is not None
    assert everywhere.rope is not None
    assert (local.window, local.rope.theta, local.rope.kind) == (4096, 1e4, "default")
    assert (everywhere.window, everywhere.rope.theta, everywhere.rope.factor) == (None, 1e6, 8.0)
    assert older.context_length == 1024


def test_windows() -> None:
    assert windows("llama", sliding_window=8) == [None] * 4
    assert windows("mistral") == [4096] * 4
    assert windows("mistral", sliding_window=None) == [None] * 4
    assert windows("qwen2", sliding_window=8) == [None] * 4
    assert windows("qwen2", sliding_window=8, use_sliding_window=False, max_window_layers=1) == [None] * 4
    assert windows("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=3) == [None] * 3 + [
        8
    ]
    assert windows("qwen2", sliding_window=8, use_sliding_window=True) == [None] * 4
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows("qwen3", sliding_window=8, use_sliding_window=True, layer_types=kinds) == [8, None] * 2
    assert windows("qwen3_moe", sliding_window=8, use_sliding_window=True) == [8] * 4
    assert windows("gemma2", sliding_window=8) == [8, None, 8, None]
    assert windows("gemma3_text", sliding_window=8) == [8] * 4
    assert windows("phi3", sliding_window=8) == [8] * 4


@pytest.mark.parametrize("kinds", [["chunked_attention"] * 4, ["full_attention"], "full_attention"])
def test_bad_layer_types_are_named(kinds: Any) -> None:
    with pytest.raises(ConfigError, match=r"^config\.json: layer_types: "):
        parse("gemma2", layer_types=kinds)


def test_layers_without_rope() -> None:
    def rotated(**changes: Any) -> list[bool]:
        return [layer.rope is not None for layer in parse("smollm3", **changes).layers]

    assert rotated() == [True, True, True, False]
    assert rotated(no_rope_layer_interval=2) == [True, False, True, False]
    assert rotated(no_rope_layers=[0, 1, 1, 1]) == [False, True, True, True]


def test_soft_caps_and_scales() -> None:
    gemma = parse("gemma2", query_pre_attn_scalar=144)
    assert (gemma.attention_softcap, gemma.logits_softcap) == (50.0, 30.0)
    assert (gemma.embedding_scale, gemma.attention_scale, gemma.norm_offset) == (8.0, 1 / 12, 1.0)
    assert parse("gemma2", attn_logit_softcapping=None).attention_softcap == 0.0
    assert parse("gemma3_text").logits_softcap == 0.0
    granite = parse("granite", attention_multiplier=0.5, logits_scaling=4.0, residual_multiplier=0.25)
    assert (granite.attention_scale, granite.logits_scale, granite.residual_scale) == (0.5, 0.25, 0.25)
    assert parse().attention_scale == pytest.approx(1 / math.sqrt(16))
    assert parse(final_logit_softcapping=30.0).logits_softcap == 0.0


def test_biases() -> None:
    def biases(config: ModelConfig) -> tuple[bool, bool, bool]:
        return config.qkv_bias, config.output_bias, config.mlp_bias

    assert biases(parse()) == (False, False, False)
    assert biases(parse(attention_bias=True)) == (True, True, False)
    assert biases(parse(mlp_bias=True)) == (False, False, True)
    assert biases(parse("qwen2")) == (True, False, False)
    assert biases(parse("mistral", attention_bias=True)) == (False, False, False)


def test_experts() -> None:
    mixtral = parse("mixtral", num_local_experts=8, num_experts_per_tok=2)
    assert mixtral.experts is not None
    assert (mixtral.experts.count, mixtral.experts.intermediate_size, mixtral.experts.normalize) == (
        8,
        96,
        True,
    )
    qwen = parse(
        "qwen3_moe", num_experts=16, mlp_only_layers=[3], decoder_sparse_step=2, moe_intermediate_size=32
    )
    assert qwen.experts is not None
    assert (qwen.experts.count, qwen.experts.intermediate_size, qwen.experts.normalize) == (16, 32, False)
    assert [layer.experts for layer in qwen.layers] == [False, True, False, False]
    with pytest.raises(ConfigError, match="num_experts_per_tok"):
        parse("mixtral", num_local_experts=2, num_experts_per_tok=3)


def test_end_of_sequence_ids() -> None:
    assert parse(eos_token_id=2).eos_token_ids == (2,)
    assert parse(eos_token_id=[2, 3]).eos_token_ids == (2, 3)
    assert parse().eos_token_ids == ()
    config = {**LLAMA, "eos_token_id": 2, "bos_token_id": 1}
    assert parse_config(config, {"eos_token_id": [5, 6]}).eos_token_ids == (5, 6)
    assert parse_config(config, {"eos_token_id": None}).eos_token_ids == (2,)
    assert parse_config(config, {}).bos_token_id == 1


def test_tied_by_default_where_the_family_is() -> None:
    assert not parse().tie_word_embeddings
    assert parse("gemma2").tie_word_embeddings
    assert parse("smollm3").tie_word_embeddings
    assert not parse("smollm3", tie_word_embeddings=False).tie_word_embeddings
