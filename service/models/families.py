"""The supported model families: for each, how config.json and the checkpoint's names map to the one decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from service.models.config_reader import ConfigError, ConfigReader

_ATTENTION = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": ("self_attn.o_proj",),
    "attention.query_norm": ("self_attn.q_norm",),
    "attention.key_norm": ("self_attn.k_norm",),
}
_MLP = {"mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"), "mlp.down": ("mlp.down_proj",)}
_PRE_NORMS = {"attention_norm": ("input_layernorm",), "mlp_norm": ("post_attention_layernorm",)}
_LLAMA_NAMES = {**_ATTENTION, **_MLP, **_PRE_NORMS}


@dataclass(frozen=True)
class Family:
    """One family. `defaults` holds the values of keys that its config.json may leave out, as transformers has them.

    `names` maps a layer's own tensors to those of the checkpoint (without "model.layers.N." and ".weight"), in the
    order in which they are joined along the rows; `{expert}` stands for each expert's number. `windows` says which
    layers have a sliding window: "none", "all", "switched" (all, with use_sliding_window), "late" (from
    max_window_layers on, likewise), "no_rope" (layers without rope, likewise) or "alternate". Fields that end in _bias
    say whether the family has that bias: `qkv_bias` always, the others where config.json sets it.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    names: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _LLAMA_NAMES)
    windows: str = "none"
    activation_key: str = "hidden_act"
    attention_bias: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = ""
    pre_norm: bool = True
    post_norm: bool = False
    norm_offset: float = 0.0
    scales_embedding: bool = False
    soft_caps: bool = False
    attention_scale: str = ""
    experts: str = ""


_COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}
_GEMMA = {
    **_COMMON,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
_GEMMA_NAMES = {
    **_ATTENTION,
    **_MLP,
    "attention_norm": ("input_layernorm",),
    "attention_post_norm": ("post_attention_layernorm",),
    "mlp_norm": ("pre_feedforward_layernorm",),
    "mlp_post_norm": ("post_feedforward_layernorm",),
}
_WINDOW_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28}

FAMILIES = (
    Family(
        "llama",
        "LlamaForCausalLM",
        {**_COMMON, "max_position_embeddings": 2048},
        attention_bias=True,
        mlp_bias=True,
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        {**_COMMON, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        windows="all",
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        {**_COMMON, **_WINDOW_DEFAULTS, "num_key_value_heads": 32, "max_position_embeddings": 32768},
        windows="late",
        qkv_bias=True,
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        {
            **_COMMON,
            **_WINDOW_DEFAULTS,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
            "head_dim": 128,
        },
        windows="late",
        attention_bias=True,
        qk_norm="head",
    ),
    Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        {
            **_COMMON,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2000000.0,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
        windows="no_rope",
        attention_bias=True,
        mlp_bias=True,
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        {
            **_GEMMA,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        names=_GEMMA_NAMES,
        windows="alternate",
        activation_key="hidden_activation",
        attention_bias=True,
        post_norm=True,
        norm_offset=1.0,
        scales_embedding=True,
        soft_caps=True,
        attention_scale="query_pre_attn_scalar",
    ),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {
            **_GEMMA,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "sliding_window_pattern": 6,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
        },
        names=_GEMMA_NAMES,
        windows="alternate",
        activation_key="hidden_activation",
        attention_bias=True,
        qk_norm="head",
        post_norm=True,
        norm_offset=1.0,
        scales_embedding=True,
        soft_caps=True,
        attention_scale="query_pre_attn_scalar",
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        {
            **_COMMON,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
        names={
            **_PRE_NORMS,
            "attention.qkv": ("self_attn.qkv_proj",),
            "attention.output": ("self_attn.o_proj",),
            "mlp.gate_up": ("mlp.gate_up_proj",),
            "mlp.down": ("mlp.down_proj",),
        },
        windows="all",
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        {**_COMMON, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
        names={
            **_ATTENTION,
            **_MLP,
            "attention_post_norm": ("post_attention_layernorm",),
            "mlp_post_norm": ("post_feedforward_layernorm",),
        },
        attention_bias=True,
        qk_norm="full",
        pre_norm=False,
        post_norm=True,
    ),
    Family(
        "granite",
        "GraniteForCausalLM",
        {**_COMMON, "max_position_embeddings": 2048, "attention_multiplier": 1.0},
        attention_bias=True,
        mlp_bias=True,
        attention_scale="attention_multiplier",
    ),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        {
            **_COMMON,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        names={
            **_ATTENTION,
            **_PRE_NORMS,
            "experts.router": ("block_sparse_moe.gate",),
            "experts.gate_up": (
                "block_sparse_moe.experts.{expert}.w1",
                "block_sparse_moe.experts.{expert}.w3",
            ),
            "experts.down": ("block_sparse_moe.experts.{expert}.w2",),
        },
        windows="all",
        experts="mixtral",
    ),
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {
            **_COMMON,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
            "sliding_window": 4096,
        },
        names={
            **_LLAMA_NAMES,
            "experts.router": ("mlp.gate",),
            "experts.gate_up": ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
            "experts.down": ("mlp.experts.{expert}.down_proj",),
        },
        windows="switched",
        attention_bias=True,
        qk_norm="head",
        experts="qwen3_moe",
    ),
)


def find_family(config: Mapping[str, Any]) -> Family:
    """The family of a model; raises ConfigError for one that is not known."""
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if not isinstance(architectures, list | None):
        raise ConfigError("architectures", f"must be a list, not {architectures!r}")
    if model_type is None and architectures:
        matches = [family for family in FAMILIES if family.architecture in architectures]
    else:
        matches = [family for family in FAMILIES if family.model_type == model_type]
    if not matches:
        key, value = ("architectures", architectures) if model_type is None else ("model_type", model_type)
        known = ", ".join(family.model_type for family in FAMILIES)
        raise ConfigError(key, f"unknown architecture {value!r}; known are {known}")
    family = matches[0]
    if architectures and family.architecture not in architectures:
        raise ConfigError(
            "architectures", f"unknown architecture {architectures!r}; expected {family.architecture}"
        )
    return family


def family_of(model_type: str) -> Family:
    """The family that `ModelConfig.model_type` names."""
    return next(family for family in FAMILIES if family.model_type == model_type)


def layer_windows(family: Family, reader: ConfigReader, layers: int) -> list[int | None]:
    """Each layer's sliding window in tokens (a token sees itself and window - 1 before it), None where it sees all."""
    if reader.raw("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention", "is not supported")
    window = None if reader.is_null("sliding_window") else reader.optional_size("sliding_window")
    if family.windows in ("late", "no_rope", "switched") and not reader.flag("use_sliding_window"):
        window = None
    if window is None or family.windows == "none":
        return [None] * layers
    if family.windows in ("all", "switched"):
        return [window] * layers
    kinds = reader.per_layer("layer_types", layers)
    if kinds is None:
        kinds = _default_kinds(family, reader, layers)
    for kind in kinds:
        if kind not in ("sliding_attention", "full_attention"):
            raise ConfigError("layer_types", f"unknown kind of layer {kind!r}")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _default_kinds(family: Family, reader: ConfigReader, layers: int) -> list[str]:
    if family.windows == "late":
        first = reader.raw("max_window_layers")
        if type(first) is not int or first < 0:
            raise ConfigError("max_window_layers", f"must be a whole number, not {first!r}")
        sliding = [layer >= first for layer in range(layers)]
    elif family.windows == "no_rope":
        sliding = [not has_rope for has_rope in layers_with_rope(reader, layers)]
    else:
        pattern = reader.size("sliding_window_pattern")
        sliding = [(layer + 1) % pattern != 0 for layer in range(layers)]
    return ["sliding_attention" if is_sliding else "full_attention" for is_sliding in sliding]


def layers_with_rope(reader: ConfigReader, layers: int) -> list[bool]:
    """Which layers rotate queries and keys: all, unless `no_rope_layers` or `no_rope_layer_interval` say otherwise."""
    flags = reader.per_layer("no_rope_layers", layers)
    if flags is not None:
        return [bool(flag) for flag in flags]
    interval = reader.optional_size("no_rope_layer_interval")
    return [interval is None or (layer + 1) % interval != 0 for layer in range(layers)]
