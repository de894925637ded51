"""Cosines and sines of rotary position embeddings. https://arxiv.org/abs/2104.09864

Two kinds depend on the length of the sequence, and a row's keys stay in the cache as they were rotated when it came.
A row uses the frequencies for the length max(prompt length, its position + 1): a whole prompt is rotated for its own
length, and each later token for the length that it makes. That is what transformers does for a prompt and its
continuation with a cache.
"""

from __future__ import annotations

import math

import torch

from service.models.rope_config import RopeConfig

_BLOCK = 256


class RotaryTable:
    """Cosines and sines for one rope.

    Positions are computed in aligned blocks of fixed size, so that a position's values never depend on which others
    were asked for. Blocks of unchanging frequencies are kept: 4 * rotary_dim bytes for each position that was met.
    """

    def __init__(self, rope: RopeConfig) -> None:
        self._rope = rope
        self._frequencies = {0: inverse_frequencies(rope, 0)}
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def rows(self, positions: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions and lengths [rows] int64 (see above) -> cos and sin [rows, 1, rotary_dim / 2] float32."""
        rope = self._rope
        if not rope.depends_on_length or int(lengths.max()) <= rope.original_length:
            return self._kept(positions, 0)
        keys = torch.where(lengths > rope.original_length, lengths, 0)
        if rope.kind == "longrope":
            keys = keys.clamp(max=rope.original_length + 1)
        cos = torch.empty(len(positions), 1, rope.rotary_dim // 2)
        sin = torch.empty_like(cos)
        for key in keys.unique().tolist():
            rows = (keys == key).nonzero().view(-1)
            keep = key == 0 or rope.kind == "longrope"
            part = self._kept(positions[rows], key) if keep else self._computed(positions[rows], key)
            cos[rows], sin[rows] = part
        return cos, sin

    def by_position(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of positions 0 ... positions - 1, and perhaps some more: [positions or more, rotary_dim / 2].

        For a rope that does not depend on lengths. The tensors are valid for as long as they are held.
        """
        cos, sin = self._table(positions, 0)
        return cos[:, 0], sin[:, 0]

    def _kept(self, positions: torch.Tensor, key: int) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._table(int(positions.max()) + 1, key)
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def _table(self, positions: int, key: int) -> tuple[torch.Tensor, torch.Tensor]:
        if key not in self._frequencies:
            self._frequencies[key] = inverse_frequencies(self._rope, key)
        wanted = -(-positions // _BLOCK)
        cos, sin = self._tables.get(key, (torch.empty(0, 1, self._rope.rotary_dim // 2),) * 2)
        have = len(cos) // _BLOCK
        if wanted > have:
            new = [_block(self._frequencies[key], block, self._rope) for block in range(have, wanted)]
            cos = torch.cat([cos, *(block[0] for block in new)])
            sin = torch.cat([sin, *(block[1] for block in new)])
            self._tables[key] = cos, sin
        return cos, sin

    def _computed(self, positions: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        frequencies = inverse_frequencies(self._rope, length)
        blocks, places = (positions // _BLOCK).unique(return_inverse=True)
        parts = [_block(frequencies, block, self._rope) for block in blocks.tolist()]
        rows = places * _BLOCK + positions % _BLOCK
        cos, sin = (torch.cat(tables).index_select(0, rows) for tables in zip(*parts, strict=True))
        return cos, sin


def _block(frequencies: torch.Tensor, block: int, rope: RopeConfig) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=torch.float32)
    angles = positions[:, None, None] * frequencies
    return angles.cos().mul_(rope.attention_factor), angles.sin().mul_(rope.attention_factor)


def inverse_frequencies(rope: RopeConfig, length: int) -> torch.Tensor:
    """Radians per position for each pair of elements, [rotary_dim / 2] float32, for a sequence of `length` tokens."""
    dim = rope.rotary_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    if rope.kind == "dynamic" and length > rope.original_length:
        stretch = rope.factor * torch.tensor(length) / rope.original_length - (rope.factor - 1)
        return 1.0 / ((rope.theta * stretch ** (dim / (dim - 2))) ** exponents)
    powers = rope.theta**exponents
    if rope.kind == "longrope":
        factors = rope.long_factor if length > rope.original_length else rope.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers)
    if rope.kind == "linear":
        return 1.0 / powers / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, 1.0 / powers)
    if rope.kind == "yarn":
        return _yarn(rope, powers)
    return 1.0 / powers


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between interpolated (Llama 3.1)."""
    wavelengths = 2 * math.pi / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = (rope.original_length / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(wavelengths > rope.original_length / low, frequencies / rope.factor, between)
    return torch.where(wavelengths < rope.original_length / high, frequencies, scaled)


def _yarn(rope: RopeConfig, powers: torch.Tensor) -> torch.Tensor:
    """https://arxiv.org/abs/2309.00071, section 3.2."""
    dim = rope.rotary_dim

    def dimension_of(rotations: float) -> float:
        turns = rope.original_length / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return ramp / (rope.factor * powers) + (1 - ramp) / powers
