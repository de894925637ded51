"""What one decoder needs to know of a model: config.json, whatever its family, brought into one form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from service.models.config_reader import ConfigError, ConfigReader
from service.models.families import find_family, layer_windows
from service.models.quantization_config import StoredQuantization, read_quantization
from service.models.rope_config import RopeConfig, layer_ropes, longest_context

__all__ = ["ConfigError", "ExpertsConfig", "LayerConfig", "ModelConfig", "RopeConfig", "parse_config"]


@dataclass(frozen=True)
class LayerConfig:
    """What may differ from layer to layer: window in tokens (None: all), rope (None: no positions), experts or one MLP."""

    window: int | None
    rope: RopeConfig | None
    experts: bool = False


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts: how many, how many per token, their width, and whether the chosen weights sum to 1."""

    count: int
    per_token: int
    intermediate_size: int
    normalize: bool


@dataclass(frozen=True)
class ModelConfig:
    """The options of the decoder. Sizes are in elements; scales are factors that are applied as named.

    `qk_norm` is "" (none), "head" (over each head) or "full" (over all heads together). Norms multiply by
    `norm_offset` + weight. A soft cap c bounds x as c * tanh(x / c); 0 is off. `context_length` is in tokens.
    `quantization` says how the checkpoint holds the matrices that it holds rounded.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    context_length: int
    norm_eps: float
    activation: str
    attention_scale: float
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = ""
    pre_norm: bool = True
    post_norm: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    experts: ExpertsConfig | None = None
    quantization: StoredQuantization | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_layers(self) -> int:
        """Layers, and with that the layers of the KV cache."""
        return len(self.layers)

    @property
    def length_dependent_from(self) -> int | None:
        """Longest sequence in tokens whose keys depend on its tokens alone; None where that is so for any length.

        Past it a rope of kind dynamic or longrope makes keys depend on the prompt's length, so that prompts of
        different lengths cannot share those of a common prefix.
        """
        lengths = [
            layer.rope.original_length for layer in self.layers if layer.rope and layer.rope.depends_on_length
        ]
        return min(lengths, default=None)


def parse_config(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Brings config.json of any supported family into one form; raises ConfigError naming the key at fault.

    End-of-sequence ids are those of generation_config.json, else of config.json.
    """
    family = find_family(config)
    reader = ConfigReader(config, family.defaults)
    layers = reader.size("num_hidden_layers")
    hidden_size, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    kv_heads = reader.optional_size("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ConfigError(
            "num_key_value_heads", f"{kv_heads} does not divide num_attention_heads, which is {heads}"
        )
    head_dim = reader.optional_size("head_dim")
    if head_dim is None:
        if hidden_size % heads:
            raise ConfigError(
                "hidden_size", f"{hidden_size} is no multiple of num_attention_heads, which is {heads}"
            )
        head_dim = hidden_size // heads
    windows = layer_windows(family, reader, layers)
    ropes = layer_ropes(family, reader, head_dim, windows)
    experts, sparse = _read_experts(family.experts, reader, layers)
    bias = reader.flag("attention_bias") and family.attention_bias
    scale = {"query_pre_attn_scalar": -0.5, "attention_multiplier": 1.0}.get(family.attention_scale)
    return ModelConfig(
        model_type=family.model_type,
        vocab_size=reader.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layers=tuple(map(LayerConfig, windows, ropes, sparse)),
        context_length=longest_context(reader.size("max_position_embeddings"), ropes, family.model_type),
        norm_eps=reader.number("rms_norm_eps"),
        activation=_read_activation(reader, family.activation_key),
        attention_scale=head_dim**-0.5 if scale is None else reader.number(family.attention_scale) ** scale,
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        qkv_bias=bias or family.qkv_bias,
        output_bias=bias,
        mlp_bias=reader.flag("mlp_bias") and family.mlp_bias,
        qk_norm=family.qk_norm,
        pre_norm=family.pre_norm,
        post_norm=family.post_norm,
        norm_offset=family.norm_offset,
        embedding_scale=hidden_size**0.5
        if family.scales_embedding
        else _read_multiplier(reader, "embedding_multiplier"),
        residual_scale=_read_multiplier(reader, "residual_multiplier"),
        logits_scale=1.0 / _read_multiplier(reader, "logits_scaling"),
        attention_softcap=_read_softcap(reader, "attn_logit_softcapping", family.soft_caps),
        logits_softcap=_read_softcap(reader, "final_logit_softcapping", family.soft_caps),
        experts=experts,
        quantization=read_quantization(reader),
        bos_token_id=_read_bos(config, generation_config or {}),
        eos_token_ids=_read_eos(config, generation_config or {}),
    )


_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


def _read_activation(reader: ConfigReader, key: str) -> str:
    name = reader.raw(key)
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ConfigError(key, f"unknown activation {name!r}; known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _read_multiplier(reader: ConfigReader, key: str) -> float:
    return 1.0 if reader.raw(key) is None else reader.number(key)


def _read_softcap(reader: ConfigReader, key: str, used: bool) -> float:
    return reader.number(key) if used and not reader.is_null(key) and reader.raw(key) is not None else 0.0


def _read_experts(kind: str, reader: ConfigReader, layers: int) -> tuple[ExpertsConfig | None, list[bool]]:
    if not kind:
        return None, [False] * layers
    count_key = "num_local_experts" if reader.has("num_local_experts") else "num_experts"
    count, per_token = reader.size(count_key), reader.size("num_experts_per_tok")
    if per_token > count:
        raise ConfigError("num_experts_per_tok", f"{per_token} is more than {count_key}, which is {count}")
    if kind == "mixtral":
        return ExpertsConfig(count, per_token, reader.size("intermediate_size"), normalize=True), [
            True
        ] * layers
    experts = ExpertsConfig(
        count, per_token, reader.size("moe_intermediate_size"), reader.flag("norm_topk_prob")
    )
    dense = reader.raw("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ConfigError("mlp_only_layers", f"must be a list of layer numbers, not {dense!r}")
    step = reader.size("decoder_sparse_step")
    return experts, [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]


def _read_bos(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> int | None:
    for source in (generation_config, config):
        value = source.get("bos_token_id")
        if type(value) is int:
            return value
    return None


def _read_eos(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    for source in (generation_config, config):
        value = source.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(item) is int and item >= 0 for item in ids):
            raise ConfigError("eos_token_id", f"must be a token id or a list of them, not {value!r}")
        return tuple(ids)
    return ()
