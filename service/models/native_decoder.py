"""The decoder of all families over the native CPU kernels: the same function as service.models.decoder, in few calls."""

from __future__ import annotations

from collections.abc import Callable

import torch

from service.kernels import operations
from service.kernels.library import KernelPool, Program
from service.models.batch import ForwardBatch, PagedKVCache, nothing, rope_lengths
from service.models.config import ModelConfig
from service.models.native_step import NativeStep, NativeWeights
from service.models.rope import RotaryTable

_LEAST_ROWS = 64


class NativeDecoder:
    """A model over packed weights that it only reads. To be used by one thread, in the process that made `pool`.

    Buffers grow with the largest step that was met: about 4 * (3 hidden + 3 intermediate + 5 heads * head_dim) bytes for
    each row of it, and 4 * (hidden + vocab) for each row whose logits were wanted. What matrices are multiplied with is
    rounded to `input_dtype`.
    """

    def __init__(self, config: ModelConfig, weights: NativeWeights, pool: KernelPool) -> None:
        self.config = config
        self._weights = weights
        self._pool = pool
        self.input_dtype = weights.input_dtype(pool.isa)
        self._rotary = {
            layer.rope: RotaryTable(layer.rope) for layer in config.layers if layer.rope is not None
        }
        # These are looked up row by row; the others' tables serve as they are.
        self._gathered = {rope: table for rope, table in self._rotary.items() if rope.depends_on_length}
        self._step: NativeStep | None = None
        self._head: _Head | None = None
        self._pinned = False

    @property
    def pool(self) -> KernelPool:
        """The threads that compute; another user of them has to be on the decoder's own thread."""
        return self._pool

    @torch.inference_mode()
    def forward(
        self, batch: ForwardBatch, cache: PagedKVCache, before_computing: Callable[[], None] = nothing
    ) -> torch.Tensor:
        """Computes the batch and writes its keys and values to the cache.

        Returns the logits of `batch.logit_rows`: [samples, vocab] float32, which the next call overwrites.
        `before_computing` is called when all is prepared for the kernels, which do without the interpreter.
        """
        step = self._prepare(batch, cache)
        samples = len(batch.logit_rows)
        if self._head is None or not self._head.fits(step, samples):
            self._head = _Head(self.config, self._weights, step, _capacity(samples, 1))
        ending = self._head.prepare(batch.logit_rows)
        before_computing()
        step.compute(ending)
        return self._head.logits[:samples]

    @torch.inference_mode()
    def hidden_states(
        self, batch: ForwardBatch, cache: PagedKVCache, before_computing: Callable[[], None] = nothing
    ) -> torch.Tensor:
        """As `forward`, but returns what the head would get of every row: the normalised last state [rows, hidden]."""
        step = self._prepare(batch, cache)
        before_computing()
        step.compute()
        hidden = step.hidden[: len(batch.token_ids)]
        out = torch.empty_like(hidden)
        self._pool.run(_normalise(self.config, self._weights, hidden, out))
        return out

    def _prepare(self, batch: ForwardBatch, cache: PagedKVCache) -> NativeStep:
        if self._pool.cpus is not None and not self._pinned:
            self._pool.pin_caller()
            self._pinned = True
        rows = len(batch.token_ids)
        step = self._step
        if step is None or step.rows < rows or step.cache is not cache:
            capacity = _capacity(rows, _LEAST_ROWS)
            step = NativeStep(
                self.config, self._weights, self._pool, cache, self._rotary, capacity, self.input_dtype
            )
            self._step = step
        rotations = {}
        if self._gathered:
            lengths = rope_lengths(batch, self.config.length_dependent_from is not None)
            rotations = {rope: table.rows(batch.positions, lengths) for rope, table in self._gathered.items()}
        step.prepare(batch, rotations)
        return step


class _Head:
    """The last norm and the logits of some rows of a step, laid out once for up to `capacity` of them."""

    def __init__(self, config: ModelConfig, weights: NativeWeights, step: NativeStep, capacity: int) -> None:
        self._step = step
        self._capacity = capacity
        self._rows = torch.zeros(capacity, dtype=torch.int64)
        self.logits = torch.empty(capacity, config.vocab_size)
        last = torch.empty(capacity, config.hidden_size, dtype=step.input_dtype)
        scale, softcap = config.logits_scale, config.logits_softcap
        parts = (
            _normalise(config, weights, step.hidden, last, self._rows),
            operations.linear(last, weights.head, self.logits, scale=scale, softcap=softcap),
        )
        self._arguments = [each.arguments for each in parts]
        self._ending = step.ending_in(parts)
        self._count = capacity

    def fits(self, step: NativeStep, samples: int) -> bool:
        """Whether it reads from this step and has room for so many rows."""
        return self._step is step and samples <= self._capacity

    def prepare(self, rows: torch.Tensor) -> Program | None:
        """What the step is to end in for the logits of rows [samples] of its hidden states to be in `logits`."""
        count = len(rows)
        if not count:
            return None
        self._rows[:count] = rows
        if count != self._count:
            self._count = count
            for arguments in self._arguments:
                arguments.rows = count
        return self._ending


def _normalise(
    config: ModelConfig,
    weights: NativeWeights,
    hidden: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor | None = None,
) -> operations.Operation:
    norm = weights.vectors["final_norm.weight"]
    return operations.rms_norm(hidden, norm, out, config.norm_eps, offset=config.norm_offset, row_index=rows)


def _capacity(rows: int, least: int) -> int:
    """So many rows that buffers seldom grow."""
    return max(least, 1 << max(rows - 1, 0).bit_length())
