"""Attention over a paged KV cache whose result for a row depends on that row's own sequence alone, bit for bit.

Every product has one fixed shape: a tile of queries against a block of KEY_BLOCK keys. Tiles and blocks start at fixed
positions of the sequence, so a position meets the same products in the same place however its prompt was cut.
Sums over blocks go from the first block to the last; the maximum of a row is exact in any order. Blocks that a row
does not see add exact zeros, so it does not matter whether they are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

KEY_BLOCK = 64
_TILE_TARGET = 16
_SCORE_ELEMENTS = 2 << 20
_GATHER_ELEMENTS = 1 << 20
_MOST_SEPARATE_TILES = 2


@dataclass(frozen=True)
class AttentionShape:
    """Sizes that attention needs: heads, key-value heads, head size in elements; `softcap` 0 is off."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float = 0.0

    @property
    def group(self) -> int:
        """Query heads for each key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def tile_queries(self) -> int:
        """Positions in a tile of queries: a power of two, so that a tile never straddles two key blocks."""
        most = max(1, _TILE_TARGET // self.group)
        return 1 << (most.bit_length() - 1)

    @property
    def tile_rows(self) -> int:
        """Rows of a tile: its positions times the query heads that share their keys."""
        return self.tile_queries * self.group


class QueryRange(Protocol):
    """One sequence's rows in the batch: `query_length` rows from `query_start`, the last at position context_length - 1."""

    @property
    def query_start(self) -> int: ...

    @property
    def query_length(self) -> int: ...

    @property
    def context_length(self) -> int: ...


@dataclass(frozen=True)
class _Tile:
    """A tile of queries: its sequence, its first position, the rows and positions in it that are real, its key blocks."""

    sequence: int
    position: int
    first_row: int
    first_position: int
    rows: int
    first_block: int
    last_block: int


@dataclass(frozen=True)
class _TileSlab:
    """Tiles that are computed together, those with most key blocks first.

    Units are pairs of a tile and one of its key blocks; all tiles' first blocks come first, then their second blocks
    and so on: `tiles_at[j]` tiles have a block j.
    """

    query_rows: torch.Tensor
    real_rows: torch.Tensor
    batch_rows: torch.Tensor
    unit_tiles: torch.Tensor
    key_slots: torch.Tensor
    mask: torch.Tensor
    tiles_at: tuple[int, ...]


@dataclass(frozen=True)
class _ChunkSlab:
    """Successive tiles of one sequence, which share its key blocks: `spans[b]` are the tiles that see block b."""

    query_rows: torch.Tensor
    real_rows: torch.Tensor
    batch_rows: torch.Tensor
    key_slots: torch.Tensor
    mask: torch.Tensor
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class AttentionPlan:
    """What to compute in every layer with the same window; made once for each step."""

    tile_slabs: tuple[_TileSlab, ...]
    chunk_slabs: tuple[_ChunkSlab, ...]


def plan_attention(
    shape: AttentionShape,
    window: int | None,
    sequences: Sequence[QueryRange],
    block_tables: torch.Tensor,
    block_size: int,
) -> AttentionPlan:
    """Cuts the batch into tiles; block_tables [sequences, most_blocks] int64, `block_size` in tokens, `window` likewise."""
    planner = _Planner(shape, window, block_tables, block_size)
    separate: list[_Tile] = []
    chunk_slabs: list[_ChunkSlab] = []
    for index, sequence in enumerate(sequences):
        tiles = planner.tiles(index, sequence)
        if len(tiles) <= _MOST_SEPARATE_TILES:
            separate.extend(tiles)
        else:
            chunk_slabs.extend(planner.chunk_slabs(tiles))
    separate.sort(key=lambda tile: tile.first_block - tile.last_block)
    return AttentionPlan(tuple(planner.tile_slabs(separate)), tuple(chunk_slabs))


class _Planner:
    def __init__(
        self, shape: AttentionShape, window: int | None, block_tables: torch.Tensor, block_size: int
    ) -> None:
        self._shape = shape
        self._window = window
        self._block_tables = block_tables
        self._block_size = block_size
        self._key_offsets = torch.arange(KEY_BLOCK)
        self._query_offsets = torch.arange(shape.tile_queries)
        self._heads = torch.arange(shape.num_kv_heads)
        self._block_elements = shape.num_kv_heads * shape.tile_rows * KEY_BLOCK

    def tiles(self, index: int, sequence: QueryRange) -> list[_Tile]:
        size = self._shape.tile_queries
        tiles = []
        first = sequence.context_length - sequence.query_length
        position, row = first, sequence.query_start
        while position < sequence.context_length:
            start = position // size * size
            rows = min(start + size, sequence.context_length) - position
            oldest = 0 if self._window is None else max(0, start - self._window + 1)
            tile = _Tile(index, start, row, position, rows, oldest // KEY_BLOCK, start // KEY_BLOCK + 1)
            tiles.append(tile)
            position, row = position + rows, row + rows
        return tiles

    def tile_slabs(self, tiles: list[_Tile]) -> list[_TileSlab]:
        slabs, start, units = [], 0, 0
        for end, tile in enumerate(tiles):
            blocks = tile.last_block - tile.first_block
            if units and (units + blocks) * self._block_elements > _SCORE_ELEMENTS:
                slabs.append(self._tile_slab(tiles[start:end]))
                start, units = end, 0
            units += blocks
        if tiles:
            slabs.append(self._tile_slab(tiles[start:]))
        return slabs

    def chunk_slabs(self, tiles: list[_Tile]) -> list[_ChunkSlab]:
        most_blocks = max(tile.last_block - tile.first_block for tile in tiles)
        at_once = max(1, _SCORE_ELEMENTS // (most_blocks * self._block_elements))
        return [self._chunk_slab(tiles[start : start + at_once]) for start in range(0, len(tiles), at_once)]

    def _tile_slab(self, tiles: list[_Tile]) -> _TileSlab:
        counts = [tile.last_block - tile.first_block for tile in tiles]
        tiles_at = tuple(sum(count > j for count in counts) for j in range(counts[0]))
        unit_tiles = torch.cat([torch.arange(count) for count in tiles_at])
        first_blocks = torch.tensor([tile.first_block for tile in tiles])
        steps = torch.repeat_interleave(torch.arange(len(tiles_at)), torch.tensor(tiles_at))
        keys = (first_blocks[unit_tiles] + steps)[:, None] * KEY_BLOCK + self._key_offsets
        queries = torch.tensor([tile.position for tile in tiles])[:, None] + self._query_offsets
        ends = torch.tensor([tile.first_position + tile.rows for tile in tiles])
        tables = self._block_tables[torch.tensor([tile.sequence for tile in tiles])]
        slots = self._slots(torch.minimum(keys, ends[unit_tiles, None] - 1), tables[unit_tiles])
        mask = self._mask(queries[unit_tiles], keys)
        return _TileSlab(*self._row_indices(tiles), unit_tiles, slots, mask[:, None, :, None], tiles_at)

    def _chunk_slab(self, tiles: list[_Tile]) -> _ChunkSlab:
        first, last = tiles[0].first_block, tiles[-1].last_block
        keys = torch.arange(first, last)[:, None] * KEY_BLOCK + self._key_offsets
        queries = torch.tensor([tile.position for tile in tiles])[:, None] + self._query_offsets
        end = tiles[-1].first_position + tiles[-1].rows
        table = self._block_tables[tiles[0].sequence].expand(last - first, -1)
        slots = self._slots(keys.clamp(max=end - 1), table)
        mask = self._mask(queries, keys[:, None])
        spans = tuple(
            (
                sum(tile.last_block <= block for tile in tiles),
                sum(tile.first_block <= block for tile in tiles),
            )
            for block in range(first, last)
        )
        return _ChunkSlab(*self._row_indices(tiles), slots, mask[:, None, :, :, None], spans)

    def _row_indices(self, tiles: list[_Tile]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The batch row of each place in the tiles (some real one where there is none), the real places, their rows."""
        rows = torch.tensor(
            [[tile.first_row, tile.first_position - tile.position, tile.rows] for tile in tiles]
        )
        places = self._query_offsets - rows[:, 1:2]
        real = (places >= 0) & (places < rows[:, 2:])
        batch_rows = rows[:, :1] + torch.minimum(places.clamp(min=0), rows[:, 2:] - 1)
        real_places = real.view(-1).nonzero().view(-1)
        return batch_rows.view(-1), real_places, batch_rows.view(-1)[real_places]

    def _slots(self, positions: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        """Rows of the cache seen as [slots * kv_heads, head_dim]; positions [n, KEY_BLOCK] -> [n, kv_heads, KEY_BLOCK]."""
        blocks = tables.gather(1, positions // self._block_size)
        slots = blocks * self._block_size + positions % self._block_size
        return slots[:, None] * self._shape.num_kv_heads + self._heads[:, None]

    def _mask(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """True where a query must not see a key: [..., queries, KEY_BLOCK]."""
        hidden = keys[..., None, :] > queries[..., None]
        if self._window is not None:
            hidden |= keys[..., None, :] <= queries[..., None] - self._window
        return hidden


def attend(
    shape: AttentionShape, plan: AttentionPlan, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """query [rows, heads, head_dim] float32; keys, values [blocks, block_size, kv_heads, head_dim]. Returns query's shape.

    Rows that the plan does not name stay zero.
    """
    out = torch.zeros_like(query)
    flat_keys, flat_values = keys.view(-1, shape.head_dim), values.view(-1, shape.head_dim)
    for tile_slab in plan.tile_slabs:
        result = _attend_tiles(shape, tile_slab, query, flat_keys, flat_values)
        out.index_copy_(0, tile_slab.batch_rows, result.index_select(0, tile_slab.real_rows))
    for chunk_slab in plan.chunk_slabs:
        result = _attend_chunk(shape, chunk_slab, query, flat_keys, flat_values)
        out.index_copy_(0, chunk_slab.batch_rows, result.index_select(0, chunk_slab.real_rows))
    return out


def _attend_tiles(
    shape: AttentionShape, slab: _TileSlab, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    heads, rows, size = shape.num_kv_heads, shape.tile_rows, shape.head_dim
    units, tiles = len(slab.unit_tiles), slab.tiles_at[0]
    tiled = query.index_select(0, slab.query_rows)
    tiled = tiled.view(tiles, shape.tile_queries, heads, shape.group, size).transpose(1, 2)
    tiled = (tiled * shape.scale).reshape(tiles, heads, rows, size)
    at_once = max(1, _GATHER_ELEMENTS // (heads * KEY_BLOCK * size))
    scores = torch.empty(units, heads, rows, KEY_BLOCK)
    for start in range(0, units, at_once):
        chosen = tiled.index_select(0, slab.unit_tiles[start : start + at_once]).flatten(0, 1)
        block = _gather(keys, slab.key_slots[start : start + at_once])
        torch.bmm(chosen, block.transpose(1, 2), out=scores[start : start + at_once].flatten(0, 1))
    _soft_cap(scores, shape.softcap)
    scores.view(units, heads, shape.tile_queries, shape.group, KEY_BLOCK).masked_fill_(slab.mask, -torch.inf)
    highest = _reduce_units(scores.amax(-1), slab.tiles_at, torch.maximum)
    scores.sub_(highest.index_select(0, slab.unit_tiles)[..., None]).exp_()
    total = _reduce_units(_sum_keys(scores), slab.tiles_at, torch.add)
    summed = torch.empty(units, heads, rows, size)
    for start in range(0, units, at_once):
        block = _gather(values, slab.key_slots[start : start + at_once])
        weights = scores[start : start + at_once].flatten(0, 1)
        torch.bmm(weights, block, out=summed[start : start + at_once].flatten(0, 1))
    mixed = _reduce_units(summed, slab.tiles_at, torch.add).div_(total[..., None])
    mixed = mixed.view(tiles, heads, shape.tile_queries, shape.group, size).transpose(1, 2)
    return mixed.reshape(-1, shape.num_heads, size)


def _attend_chunk(
    shape: AttentionShape, slab: _ChunkSlab, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    heads, rows, size = shape.num_kv_heads, shape.tile_rows, shape.head_dim
    tiles = len(slab.query_rows) // shape.tile_queries
    tiled = query.index_select(0, slab.query_rows)
    tiled = tiled.view(tiles, shape.tile_queries, heads, shape.group, size).permute(2, 0, 1, 3, 4)
    tiled = (tiled * shape.scale).reshape(heads, tiles, rows, size)
    scores = torch.empty(len(slab.spans), heads, tiles, rows, KEY_BLOCK)
    for index, (low, high) in enumerate(slab.spans):
        block = _gather(keys, slab.key_slots[index]).transpose(1, 2)
        for head in range(heads):
            shared = block[head].expand(high - low, -1, -1)
            torch.bmm(tiled[head, low:high], shared, out=scores[index, head, low:high])
    _soft_cap(scores, shape.softcap)
    blocks = len(slab.spans)
    split = scores.view(blocks, heads, tiles, shape.tile_queries, shape.group, KEY_BLOCK)
    split.masked_fill_(slab.mask, -torch.inf)
    scores.sub_(scores.amax(dim=(0, -1))[..., None]).exp_()
    totals = _sum_keys(scores)
    total, mixed = torch.zeros(heads, tiles, rows), torch.zeros(heads, tiles, rows, size)
    for index, (low, high) in enumerate(slab.spans):
        total.add_(totals[index])
        block = _gather(values, slab.key_slots[index])
        for head in range(heads):
            shared = block[head].expand(high - low, -1, -1)
            mixed[head, low:high].add_(torch.bmm(scores[index, head, low:high], shared))
    mixed = mixed.div_(total[..., None]).view(heads, tiles, shape.tile_queries, shape.group, size)
    return mixed.permute(1, 2, 0, 3, 4).reshape(-1, shape.num_heads, size)


def _gather(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """cache [slots * kv_heads, head_dim], slots [..., KEY_BLOCK] -> [products, KEY_BLOCK, head_dim] float32."""
    return cache.index_select(0, slots.reshape(-1)).view(-1, KEY_BLOCK, cache.shape[1]).float()


def _soft_cap(scores: torch.Tensor, cap: float) -> None:
    if cap:
        scores.div_(cap).tanh_().mul_(cap)


def _sum_keys(weights: torch.Tensor) -> torch.Tensor:
    """weights [..., tile_rows, KEY_BLOCK] -> sums [..., tile_rows], as products of one fixed shape like all others."""
    flat = weights.view(-1, *weights.shape[-2:])
    ones = torch.ones(1, KEY_BLOCK, 4).expand(len(flat), -1, -1)
    return torch.bmm(flat, ones)[..., 0].view(weights.shape[:-1])


def _reduce_units(
    units: torch.Tensor, tiles_at: tuple[int, ...], combine: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Combines the units of each tile from its first key block to its last: [units, ...] -> [tiles, ...]."""
    # Adding zero makes a negative zero positive, as the sums that start from zero have it.
    result = units[: tiles_at[0]] + 0.0
    start = tiles_at[0]
    for count in tiles_at[1:]:
        combine(result[:count], units[start : start + count], out=result[:count])
        start += count
    return result
