"""The decoder of all families over the native CPU kernels: the same function as service.models.decoder, in few calls."""

from __future__ import annotations

import torch

from service.kernels import operations
from service.kernels.library import KernelPool
from service.models.batch import ForwardBatch, PagedKVCache, rope_lengths
from service.models.config import ModelConfig
from service.models.native_step import NativeStep, NativeWeights
from service.models.rope import RotaryTable

_LEAST_ROWS = 64


class NativeDecoder:
    """A model over packed weights that it only reads. To be used by one thread, in the process that made `pool`.

    Buffers grow with the largest step that was met: about 4 * (3 hidden + 3 intermediate + 5 heads * head_dim) bytes for
    each row of it, and 4 * vocab for each row whose logits were wanted.
    """

    def __init__(self, config: ModelConfig, weights: NativeWeights, pool: KernelPool) -> None:
        self.config = config
        self._weights = weights
        self._pool = pool
        self._final_norm = weights.vectors["final_norm.weight"]
        self._rotary = {
            layer.rope: RotaryTable(layer.rope) for layer in config.layers if layer.rope is not None
        }
        self._step: NativeStep | None = None
        self._logits = torch.empty(0, config.vocab_size)
        self._pinned = False

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: PagedKVCache) -> torch.Tensor:
        """Computes the batch and writes its keys and values to the cache.

        Returns the logits of `batch.logit_rows`: [samples, vocab] float32, which the next call overwrites.
        """
        hidden = self._run(batch, cache)
        samples = len(batch.logit_rows)
        if len(self._logits) < samples:
            self._logits = torch.empty(_capacity(samples), self.config.vocab_size)
        logits = self._logits[:samples]
        if samples:
            last = torch.empty(samples, self.config.hidden_size)
            self._pool.run(
                self._normalise(hidden, last, batch.logit_rows),
                operations.linear(
                    last,
                    self._weights.head,
                    logits,
                    scale=self.config.logits_scale,
                    softcap=self.config.logits_softcap,
                ),
            )
        return logits

    @torch.inference_mode()
    def hidden_states(self, batch: ForwardBatch, cache: PagedKVCache) -> torch.Tensor:
        """As `forward`, but returns what the head would get of every row: the normalised last state [rows, hidden]."""
        hidden = self._run(batch, cache)
        out = torch.empty_like(hidden)
        self._pool.run(self._normalise(hidden, out))
        return out

    def _run(self, batch: ForwardBatch, cache: PagedKVCache) -> torch.Tensor:
        if self._pool.cpus is not None and not self._pinned:
            self._pool.pin_caller()
            self._pinned = True
        rows = len(batch.token_ids)
        if self._step is None or self._step.rows < rows or self._step.cache is not cache:
            self._step = NativeStep(self.config, self._weights, self._pool, cache, _capacity(rows))
        lengths = rope_lengths(batch, self.config.length_dependent_from is not None)
        rotations = {rope: table.rows(batch.positions, lengths) for rope, table in self._rotary.items()}
        return self._step.run(batch, rotations)

    def _normalise(
        self, hidden: torch.Tensor, out: torch.Tensor, rows: torch.Tensor | None = None
    ) -> operations.Operation:
        config = self.config
        return operations.rms_norm(
            hidden, self._final_norm, out, config.norm_eps, offset=config.norm_offset, row_index=rows
        )


def _capacity(rows: int) -> int:
    """So many rows that buffers seldom grow."""
    return max(_LEAST_ROWS, 1 << (rows - 1).bit_length())
