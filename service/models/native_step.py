"""One step of a model as a list of kernel operations, laid out once over buffers of its own.

What changes from step to step (rows, sequences, block tables) is written into the operations' arguments, so that a step
costs the interpreter a few assignments for each operation and the kernels one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from service.kernels import operations, structures
from service.kernels.library import KernelPool, Program
from service.kernels.operations import Operation
from service.kernels.packed import PackedWeight
from service.models.batch import ForwardBatch, PagedKVCache
from service.models.config import LayerConfig, ModelConfig, RopeConfig
from service.models.native_experts import mix_experts
from service.models.rope import RotaryTable


@dataclass(frozen=True)
class NativeWeights:
    """A model's weights by the names of service.models.weights: packed matrices, and vectors as they are.

    Experts of a layer are a tuple, one matrix for each.
    """

    matrices: Mapping[str, PackedWeight]
    experts: Mapping[str, tuple[PackedWeight, ...]]
    vectors: Mapping[str, torch.Tensor]

    @property
    def embedding(self) -> PackedWeight:
        """[vocab, hidden]."""
        return self.matrices["embed_tokens.weight"]

    @property
    def head(self) -> PackedWeight:
        """[vocab, hidden]; the embedding where they are tied."""
        return self.matrices.get("lm_head.weight", self.embedding)

    def input_dtype(self, isa: str) -> torch.dtype:
        """bfloat16 where tile registers multiply it with all weights, several times as fast as float32."""
        for_tiles = all(matrix.is_exact_in_bfloat16 for matrix in self.matrices.values())
        return torch.bfloat16 if isa == "amx" and for_tiles and not self.experts else torch.float32


@dataclass
class _Part:
    """Operations in a row, or what has to be decided between them."""

    operations: list[Operation] = field(default_factory=list)
    between: Callable[[int], None] | None = None
    program: Program | None = None


class NativeStep:
    """The operations of a step of up to `rows` rows, over one cache. Buffers are float32, but for those that matrices are
    multiplied with where `input_dtype` is bfloat16.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: NativeWeights,
        pool: KernelPool,
        cache: PagedKVCache,
        rotary: Mapping[RopeConfig, RotaryTable],
        rows: int,
        input_dtype: torch.dtype,
    ) -> None:
        self.rows = rows
        self.input_dtype = input_dtype
        self.cache = cache
        self._config = config
        self._weights = weights
        self._pool = pool
        heads = config.num_heads * config.head_dim
        joined = heads + 2 * config.num_kv_heads * config.head_dim
        width = config.intermediate_size
        self._token_ids = torch.zeros(rows, dtype=torch.int64)
        self._slots = torch.zeros(rows, dtype=torch.int64)
        self._positions = torch.zeros(rows, dtype=torch.int64)
        self.hidden = torch.empty(rows, config.hidden_size)
        self._normed = torch.empty(rows, config.hidden_size, dtype=input_dtype)
        has_own_change = config.post_norm or input_dtype != torch.float32
        self._change = torch.empty(rows, config.hidden_size) if has_own_change else self._normed
        self._qkv = torch.empty(rows, joined)
        self._query = torch.empty(rows, heads)
        self._attended = torch.empty(rows, heads, dtype=input_dtype)
        self._gate_up = torch.empty(rows, 2 * width)
        self._gated = torch.empty(rows, width, dtype=input_dtype)
        # Of ropes that depend on lengths each row's cosines and sines; of the others tables by position.
        self._rotations = {
            rope: (torch.empty(rows, rope.rotary_dim // 2), torch.empty(rows, rope.rotary_dim // 2))
            for rope in rotary
            if rope.depends_on_length
        }
        self._tables = {rope: table for rope, table in rotary.items() if not rope.depends_on_length}
        self._table_users: dict[RopeConfig, list[structures.Rope]] = {rope: [] for rope in self._tables}
        self._kept_tables: dict[RopeConfig, tuple[torch.Tensor, torch.Tensor]] = {}
        self._known_positions = 0
        self._sequences = np.zeros(0, dtype=structures.Sequence)
        self._block_tables = torch.zeros(0, 0, dtype=torch.int64)
        self._parts: list[_Part] = [_Part()]
        self._lay_out()
        built = [each.arguments for part in self._parts for each in part.operations]
        self._attentions = [each for each in built if isinstance(each, structures.Attention)]
        self._with_rows = [each for each in built if not isinstance(each, structures.Attention)]
        self._set_rows = rows
        self._set_sequences = 0
        for part in self._parts:
            part.program = Program(part.operations) if part.operations else None

    def prepare(
        self, batch: ForwardBatch, rotations: Mapping[RopeConfig, tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """Takes over the batch that `compute` is to compute next.

        `rotations` are the rows' cosines and sines [rows, 1, rotary_dim / 2] for each rope that depends on lengths.
        """
        rows = len(batch.token_ids)
        self._token_ids[:rows] = batch.token_ids
        self._slots[:rows] = batch.slot_mapping
        self._positions[:rows] = batch.positions
        for rope, (cosines, sines) in rotations.items():
            own_cosines, own_sines = self._rotations[rope]
            own_cosines[:rows] = cosines[:, 0]
            own_sines[:rows] = sines[:, 0]
        # A step is mostly as large as the one before it, and whatever is not touched here costs nothing.
        if rows != self._set_rows:
            self._set_rows = rows
            for arguments in self._with_rows:
                arguments.rows = rows
        self._describe_sequences(batch)

    def ending_in(self, operations: Sequence[Operation]) -> Program:
        """The step's last operations and then these, as one call of the kernels; for `compute`."""
        return Program([*self._parts[-1].operations, *operations])

    def compute(self, ending: Program | None = None) -> None:
        """Computes the batch's hidden states before the last norm, as the first rows of `hidden`, until the next time.

        `ending` is what `ending_in` gave, and runs in place of the step's last operations.
        """
        for part in self._parts[:-1]:
            if part.program is not None:
                self._pool.run_program(part.program)
            if part.between is not None:
                part.between(self._set_rows)
        last = ending or self._parts[-1].program
        if last is not None:
            self._pool.run_program(last)

    def _describe_sequences(self, batch: ForwardBatch) -> None:
        tables = batch.block_tables
        count, blocks = tables.shape
        is_larger = len(self._sequences) < count or self._block_tables.shape[1] < blocks
        if is_larger:
            # Twice the need, so that this seldom happens.
            places = max(len(self._sequences), 2 * count)
            self._sequences = np.zeros(places, dtype=structures.Sequence)
            width = max(self._block_tables.shape[1], 2 * blocks)
            self._block_tables = torch.zeros(places, width, dtype=torch.int64)
        self._block_tables[:count, :blocks] = tables
        for column, name in enumerate(("query_start", "query_length", "context_length")):
            self._sequences[name][:count] = batch.slices[:, column]
        longest = int(batch.slices[:, 2].max(initial=0))
        if is_larger or count != self._set_sequences:
            self._set_sequences = count
            address, place = self._block_tables.data_ptr(), self._sequences.ctypes.data
            for attention in self._attentions:
                attention.sequence_count = count
                attention.sequences = place
                attention.block_tables = address
                attention.table_stride = self._block_tables.stride(0)
        if longest > self._known_positions:
            self._lengthen_tables(longest)

    def _lengthen_tables(self, positions: int) -> None:
        self._known_positions = max(positions, 2 * self._known_positions)
        for rope, users in self._table_users.items():
            cosines, sines = self._tables[rope].by_position(self._known_positions)
            self._kept_tables[rope] = cosines, sines
            for arguments in users:
                arguments.cosine, arguments.sine = cosines.data_ptr(), sines.data_ptr()
                arguments.table_rows = len(cosines)

    def _lay_out(self) -> None:
        config = self._config
        self._add(
            operations.embedding(
                self._token_ids, self._weights.embedding, self.hidden, config.embedding_scale
            )
        )
        for index, layer in enumerate(config.layers):
            self._lay_out_attention(f"layers.{index}.", index, layer)
            self._lay_out_mlp(f"layers.{index}.", layer)

    def _lay_out_attention(self, prefix: str, index: int, layer: LayerConfig) -> None:
        config, qkv = self._config, self._qkv
        self._add_linear(f"{prefix}attention.qkv", self._norm_first(f"{prefix}attention_norm"), qkv)
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        query_norm = self._weights.vectors.get(f"{prefix}attention.query_norm.weight")
        key_norm = self._weights.vectors.get(f"{prefix}attention.key_norm.weight")
        if config.qk_norm == "full" and query_norm is not None and key_norm is not None:
            self._add_norm(qkv[:, :query_size], query_norm, qkv[:, :query_size])
            keys = qkv[:, query_size : query_size + kv_size]
            self._add_norm(keys, key_norm, keys)
            query_norm = key_norm = None
        keys, values = self.cache.keys[index], self.cache.values[index]
        self._add_rotation(layer.rope, keys, values, query_norm, key_norm)
        self._add(
            operations.paged_attention(
                self._query,
                keys,
                values,
                torch.zeros(1, 1, dtype=torch.int64),
                (),
                self._attended,
                scale=config.attention_scale,
                softcap=config.attention_softcap,
                window=layer.window,
            )
        )
        self._add_to_hidden(f"{prefix}attention.output", self._attended, f"{prefix}attention_post_norm")

    def _add_rotation(
        self,
        rope: RopeConfig | None,
        keys: torch.Tensor,
        values: torch.Tensor,
        query_norm: torch.Tensor | None,
        key_norm: torch.Tensor | None,
    ) -> None:
        cosines = sines = positions = None
        if rope is not None and rope in self._tables:
            cosines, sines = self._tables[rope].by_position(1)
            positions = self._positions
        elif rope is not None:
            cosines, sines = self._rotations[rope]
        operation = operations.rotate_and_cache(
            self._qkv,
            self._query,
            keys,
            values,
            self._slots,
            cosine=cosines,
            sine=sines,
            positions=positions,
            query_norm=query_norm,
            key_norm=key_norm,
            eps=self._config.norm_eps,
            norm_offset=self._config.norm_offset,
        )
        if rope is not None and rope in self._tables:
            assert isinstance(operation.arguments, structures.Rope)
            self._table_users[rope].append(operation.arguments)
        self._add(operation)

    def _lay_out_mlp(self, prefix: str, layer: LayerConfig) -> None:
        config = self._config
        source = self._norm_first(f"{prefix}mlp_norm")
        if layer.experts and config.experts is not None:
            self._lay_out_experts(prefix, source)
            return
        self._add_linear(f"{prefix}mlp.gate_up", source, self._gate_up)
        self._add(operations.activation(self._gate_up, self._gated, config.activation))
        self._add_to_hidden(f"{prefix}mlp.down", self._gated, f"{prefix}mlp_post_norm")

    def _lay_out_experts(self, prefix: str, source: torch.Tensor) -> None:
        """Which rows an expert gets is known only when the router has run: what comes before is a part of its own."""
        config, weights, change = self._config, self._weights, self._change
        assert config.experts is not None
        experts, router = config.experts, weights.matrices[f"{prefix}experts.router.weight"]
        gate_up, down = (weights.experts[f"{prefix}experts.{name}.weight"] for name in ("gate_up", "down"))

        def between(rows: int) -> None:
            mixed = mix_experts(self._pool, source[:rows], router, gate_up, down, experts, config.activation)
            change[:rows] = mixed

        self._parts[-1].between = between
        self._parts.append(_Part())
        post_norm = weights.vectors.get(f"{prefix}mlp_post_norm.weight")
        if post_norm is None:
            self._add(operations.add(change, self.hidden, self.hidden, config.residual_scale))
        else:
            self._add_norm(change, post_norm, self.hidden, residual=True)

    def _norm_first(self, name: str) -> torch.Tensor:
        """The hidden states as a block of the layer takes them: normalised, in most families."""
        weight = self._weights.vectors.get(f"{name}.weight")
        if weight is None:
            return self.hidden
        self._add_norm(self.hidden, weight, self._normed)
        return self._normed

    def _add_to_hidden(self, name: str, x: torch.Tensor, post_norm: str) -> None:
        weight = self._weights.vectors.get(f"{post_norm}.weight")
        if weight is None:
            self._add_linear(name, x, self.hidden, residual=self.hidden, scale=self._config.residual_scale)
            return
        self._add_linear(name, x, self._change)
        self._add_norm(self._change, weight, self.hidden, residual=True)

    def _add_norm(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, residual: bool = False
    ) -> None:
        config = self._config
        self._add(
            operations.rms_norm(
                x,
                weight,
                out,
                config.norm_eps,
                offset=config.norm_offset,
                scale=config.residual_scale if residual else 1.0,
                residual=out if residual else None,
            )
        )

    def _add_linear(
        self,
        name: str,
        x: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> None:
        weight, bias = self._weights.matrices[f"{name}.weight"], self._weights.vectors.get(f"{name}.bias")
        self._add(operations.linear(x, weight, out, bias=bias, residual=residual, scale=scale))

    def _add(self, operation: Operation) -> None:
        self._parts[-1].operations.append(operation)
