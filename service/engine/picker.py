"""What picks tokens from finished logits: the native kernel where its library is loaded, else numpy and torch.

Both give each row the same distribution, in which weights may differ by the rounding of one exponential.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from service.engine.distribution import RowSoftmax, draw, log_of_sum
from service.engine.logprobs import position_logprobs
from service.engine.narrowed import draw_narrowed
from service.engine.request import PositionLogprobs, TokenLogprob
from service.engine.sampling_state import SamplingState
from service.kernels import operations
from service.kernels.library import KernelPool, Program, load
from service.kernels.structures import Choice, Sample


class ReferencePicker:
    """Picks with numpy and torch: what the kernel is tested against, and what samples where it was not built."""

    def pick(
        self, logits: torch.Tensor, drawn: Sequence[SamplingState | None]
    ) -> tuple[list[float], list[int]]:
        """The largest value of each row of logits [rows, vocab] fp32, NaN where the row holds one, and its token: drawn,
        or the first of the likeliest where `drawn` is None. Where the largest value is not finite the token means nothing.
        """
        states = {row: state for row, state in enumerate(drawn) if state is not None}
        narrowed = [row for row, state in states.items() if state.narrows]
        others = (
            range(len(drawn)) if not narrowed else [row for row in range(len(drawn)) if row not in narrowed]
        )
        highest, tokens = [0.0] * len(drawn), [-1] * len(drawn)
        for row, value, token_id in zip(others, *_peaks(logits, others), strict=True):
            highest[row], tokens[row] = value, token_id
        if not states:
            return highest, tokens
        # Draws are made on the CPU.
        logits = logits.cpu()
        softmax = RowSoftmax(logits.shape[1])
        if narrowed:
            part = logits if len(narrowed) == len(drawn) else logits[torch.tensor(narrowed)]
            found = draw_narrowed(part, [states[row] for row in narrowed], softmax)
            for row, value, drawn_id in zip(narrowed, *found, strict=True):
                highest[row], tokens[row] = value, drawn_id
        scores = logits.numpy()
        for row, state in states.items():
            if math.isfinite(highest[row]) and (not state.narrows or tokens[row] < 0):
                candidates = softmax.filtered(scores[row], highest[row], state.filters)
                tokens[row] = candidates.token_id(draw(candidates.weights, state.uniform()))
        return highest, tokens

    def logprobs(
        self, logits: torch.Tensor, token_ids: Sequence[int], top: Sequence[int]
    ) -> list[PositionLogprobs]:
        """For each row of logits [rows, vocab] fp32 the log probability of its token and of the `top` likeliest ones.

        Among equal logits the lower token id ranks first. Raises ValueError for a row without finite maximum.
        """
        return position_logprobs(logits, token_ids, top)


class KernelPicker:
    """Picks with the native kernel on the threads of a pool, which nobody else may use meanwhile."""

    def __init__(self, pool: KernelPool) -> None:
        self.pool = pool
        self._reference = ReferencePicker()
        self._kept: _Picking | None = None

    def pick(
        self, logits: torch.Tensor, drawn: Sequence[SamplingState | None]
    ) -> tuple[list[float], list[int]]:
        """As `ReferencePicker.pick`, which it leaves logits in the memory of a GPU to."""
        if logits.device.type != "cpu":
            return self._reference.pick(logits, drawn)
        logits = _without_gaps(logits)
        if self._kept is None or not self._kept.fits(logits):
            self._kept = _Picking(logits)
        return self._kept.run(self.pool, drawn)

    def logprobs(
        self, logits: torch.Tensor, token_ids: Sequence[int], top: Sequence[int]
    ) -> list[PositionLogprobs]:
        """As `ReferencePicker.logprobs`."""
        logits, rows = _without_gaps(logits.cpu()), len(logits)
        tokens, wanted = torch.tensor([[*token_ids], [*top]], dtype=torch.int64)
        largest = torch.empty(rows)
        sums, ranks = torch.empty(2, rows, dtype=torch.int64)
        likeliest = torch.empty(rows, max(top, default=0), dtype=torch.int64)
        self.pool.run(operations.ranking(logits, tokens, wanted, largest, sums, ranks, likeliest))
        if not bool(largest.isfinite().all()):
            raise ValueError("the model's logits hold NaN or infinity")
        ids = torch.cat((tokens[:, None], likeliest), dim=1)
        values = logits.gather(1, ids.clamp(min=0)).tolist()
        return [
            _position(normalizer, rank, row_ids, row_values)
            for normalizer, rank, row_ids, row_values in zip(
                map(log_of_sum, largest.tolist(), sums.tolist()),
                ranks.tolist(),
                ids.tolist(),
                values,
                strict=True,
            )
        ]


class _Picking:
    """Picking from logits that lie in one place, laid out once for up to as many rows as these are.

    Steps mostly write their logits where the last one did, and after a step nothing that this takes is in a cache.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        rows = len(logits)
        self._place = _place(logits)
        self._most_rows = rows
        largest, tokens = torch.empty(rows), torch.empty(rows, dtype=torch.int64)
        self._largest, self._tokens = largest.numpy(), tokens.numpy()
        self._choices = (Choice * rows)()
        self._drawn: tuple[int, ...] = ()
        operation = operations.sample(logits, self._choices, largest, tokens)
        assert isinstance(operation.arguments, Sample)
        self._arguments = operation.arguments
        self._program = Program([operation])

    def fits(self, logits: torch.Tensor) -> bool:
        """Whether this can pick from these logits."""
        return len(logits) <= self._most_rows and _place(logits) == self._place

    def run(self, pool: KernelPool, drawn: Sequence[SamplingState | None]) -> tuple[list[float], list[int]]:
        """What `KernelPicker.pick` returns for the first rows."""
        rows = len(drawn)
        for row in self._drawn:
            self._choices[row] = Choice()
        states = {row: state for row, state in enumerate(drawn) if state is not None}
        for row, state in states.items():
            self._choices[row] = _choice(state)
        self._drawn = tuple(states)
        self._arguments.rows = rows
        pool.run_program(self._program)
        return self._largest[:rows].tolist(), self._tokens[:rows].tolist()


Picker = KernelPicker | ReferencePicker


def open_picker(pool: KernelPool | None = None) -> Picker:
    """The kernel on `pool`, or on the calling thread alone without one; the reference where there are no kernels.

    To be called in the process that is to pick.
    """
    if pool is None:
        library = load()
        if library is None:
            return ReferencePicker()
        pool = KernelPool(library, threads=1)
    return KernelPicker(pool)


def _choice(state: SamplingState) -> Choice:
    filters = state.filters
    return Choice(
        filters.temperature, filters.top_p, filters.min_p, filters.typical_p, filters.top_k, state.uniform()
    )


def _position(normalizer: float, rank: int, ids: Sequence[int], values: Sequence[float]) -> PositionLogprobs:
    """The first id is that of the token, the others are the likeliest ones, filled up with -1."""
    top = (
        TokenLogprob(token_id, value - normalizer, place)
        for place, (token_id, value) in enumerate(zip(ids[1:], values[1:], strict=True), start=1)
        if token_id >= 0
    )
    return PositionLogprobs(TokenLogprob(ids[0], values[0] - normalizer, rank), tuple(top))


def _place(logits: torch.Tensor) -> tuple[int, int, int]:
    return logits.data_ptr(), logits.stride(0), logits.shape[1]


def _without_gaps(logits: torch.Tensor) -> torch.Tensor:
    if logits.stride(1) == 1 and logits.stride(0) >= logits.shape[1]:
        return logits
    return logits.contiguous()


def _peaks(logits: torch.Tensor, rows: Sequence[int]) -> tuple[list[float], list[int]]:
    """The largest value of some rows and its first column; a NaN counts as the largest."""
    if logits.device.type == "cpu":
        # Row by row nothing is copied; numpy's argmax is many times as fast as torch's here.
        scores = logits.numpy()
        columns = [int(scores[row].argmax()) for row in rows]
        return scores[list(rows), columns].tolist(), columns
    best = logits.argmax(dim=1)
    values, columns = logits.gather(1, best[:, None])[:, 0].tolist(), best.tolist()
    return [values[row] for row in rows], [columns[row] for row in rows]
