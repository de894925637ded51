"""Reads the many forms in which config.json describes rotary position embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from service.models.config_reader import ConfigError, ConfigReader
from service.models.families import Family, layers_with_rope

_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer.

    `kind` is default, linear, dynamic, yarn, longrope or llama3; `rotary_dim` the leading part of a head that is rotated.
    `original_length` is the trained length in tokens, `attention_factor` scales cosines and sines. Fields that a kind
    does not use keep their defaults.
    """

    kind: str
    theta: float
    rotary_dim: int
    original_length: int
    factor: float = 1.0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def depends_on_length(self) -> bool:
        """Whether a token's rotation depends on how long its sequence is, once that passes `original_length`."""
        return self.kind in ("dynamic", "longrope")


def layer_ropes(
    family: Family, reader: ConfigReader, head_dim: int, windows: Sequence[int | None]
) -> list[RopeConfig | None]:
    """Each layer's rope, None where it has none.

    Takes the older `rope_theta` with `rope_scaling` and the newer `rope_parameters`, flat or for each kind of layer.
    """
    full, sliding = _read_both(family, reader, head_dim)
    rotated = layers_with_rope(reader, len(windows))
    return [
        (full if window is None else sliding) if has_rope else None
        for window, has_rope in zip(windows, rotated, strict=True)
    ]


def longest_context(max_position: int, ropes: Sequence[RopeConfig | None], model_type: str) -> int:
    """How many tokens a sequence may hold: `max_position_embeddings`, stretched where the rope counts from it."""
    longest = max_position
    for rope in filter(None, ropes):
        if rope.kind == "yarn":
            longest = max(longest, int(rope.original_length * rope.factor))
        # Gemma 3 states the stretched length in max_position_embeddings itself.
        elif rope.kind in ("linear", "dynamic") and model_type != "gemma3_text":
            longest = max(longest, int(max_position * rope.factor))
    return longest


def _read_both(family: Family, reader: ConfigReader, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    key = "rope_parameters" if reader.raw("rope_parameters") else "rope_scaling"
    parameters = reader.raw(key) or {}
    if not isinstance(parameters, dict):
        raise ConfigError(key, f"must be an object, not {parameters!r}")
    full, sliding = parameters, parameters
    local_theta = "rope_local_base_freq" if family.model_type == "gemma3_text" else "rope_theta"
    if "full_attention" in parameters or "sliding_attention" in parameters:
        full, sliding = parameters.get("full_attention") or {}, parameters.get("sliding_attention") or {}
    elif family.model_type == "gemma3_text":
        sliding = {}
    return (
        _read_rope(reader, full, key, head_dim, "rope_theta"),
        _read_rope(reader, sliding, key, head_dim, local_theta),
    )


def _read_rope(
    reader: ConfigReader, parameters: dict[str, Any], key: str, head_dim: int, theta_key: str
) -> RopeConfig:
    if not isinstance(parameters, dict):
        raise ConfigError(key, f"must hold objects, not {parameters!r}")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = "longrope" if kind == "su" else kind
    if kind not in _KINDS:
        raise ConfigError(f"{key}.rope_type", f"unknown type {kind!r}; known are {', '.join(_KINDS)}")
    values = _Parameters(parameters, key)
    theta = (
        values.number("rope_theta") if parameters.get("rope_theta") is not None else reader.number(theta_key)
    )
    partial = parameters.get("partial_rotary_factor")
    if partial is None:
        partial = (
            1.0 if reader.raw("partial_rotary_factor") is None else reader.number("partial_rotary_factor")
        )
    rotary_dim = int(head_dim * partial)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise ConfigError("partial_rotary_factor", f"rotates {rotary_dim} of {head_dim} elements of a head")
    max_position = reader.size("max_position_embeddings")
    if kind == "default":
        return RopeConfig(kind, theta, rotary_dim, max_position)
    if kind in ("linear", "dynamic"):
        return RopeConfig(kind, theta, rotary_dim, max_position, values.number("factor"))
    original = reader.optional_size("original_max_position_embeddings")
    if original is None:
        original = int(values.number("original_max_position_embeddings", max_position))
    factor = values.number("factor", max_position / original) if kind != "llama3" else values.number("factor")
    if kind == "llama3":
        low, high = values.number("low_freq_factor"), values.number("high_freq_factor")
        if high <= low:
            raise ConfigError(
                f"{key}.high_freq_factor", f"{high} is not above low_freq_factor, which is {low}"
            )
        return RopeConfig(
            kind, theta, rotary_dim, original, factor, low_freq_factor=low, high_freq_factor=high
        )
    if kind == "yarn":
        return RopeConfig(
            kind,
            theta,
            rotary_dim,
            original,
            factor,
            attention_factor=_yarn_attention_factor(values, factor),
            beta_fast=values.number("beta_fast", 32.0),
            beta_slow=values.number("beta_slow", 1.0),
            truncate=parameters.get("truncate", True) is not False,
        )
    return RopeConfig(
        kind,
        theta,
        rotary_dim,
        original,
        factor,
        attention_factor=values.number("attention_factor", _longrope_attention_factor(factor, original)),
        short_factor=values.factors("short_factor", rotary_dim // 2),
        long_factor=values.factors("long_factor", rotary_dim // 2),
    )


class _Parameters:
    """Typed access to the items of `rope_scaling` or `rope_parameters`."""

    def __init__(self, values: dict[str, Any], key: str) -> None:
        self._values = values
        self._key = key

    def number(self, name: str, default: float | None = None) -> float:
        value = self._values.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            problem = "is missing" if value is None else f"must be a number above 0, not {value!r}"
            raise ConfigError(f"{self._key}.{name}", problem)
        return value

    def optional(self, name: str) -> float | None:
        return None if self._values.get(name) is None else self.number(name)

    def factors(self, name: str, count: int) -> tuple[float, ...]:
        values = self._values.get(name)
        numeric = isinstance(values, list) and all(isinstance(v, int | float) and v > 0 for v in values)
        if not isinstance(values, list) or not numeric or len(values) != count:
            raise ConfigError(f"{self._key}.{name}", f"must be a list of {count} numbers above 0")
        return tuple(values)


def _yarn_attention_factor(values: _Parameters, factor: float) -> float:
    """https://arxiv.org/abs/2309.00071, section 3.4."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    explicit = values.optional("attention_factor")
    if explicit is not None:
        return explicit
    weight, weight_all = values.optional("mscale"), values.optional("mscale_all_dim")
    return scale(weight) / scale(weight_all) if weight and weight_all else scale(1.0)


def _longrope_attention_factor(factor: float, original: int) -> float:
    """https://arxiv.org/abs/2402.13753."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
