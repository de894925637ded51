"""An embedding while its prompt is computed piece by piece: the hidden states of its tokens become one vector."""

from __future__ import annotations

import torch

from service.engine.request import EmbeddingParams, Pooling


class EmbeddingPool:
    """Takes the hidden states of a prompt in order of position, in pieces of any size, some of them again.

    The vector does not depend on the pieces: sums are float64 and go from the first token to the last.
    """

    def __init__(self, params: EmbeddingParams) -> None:
        self._params = params
        self._state = torch.empty(0)
        self._covered = 0

    @property
    def covered(self) -> int:
        """Leading tokens whose hidden states need not come again."""
        return self._covered

    @property
    def needs_all(self) -> bool:
        """Whether every token's hidden state is wanted, not the last one's alone."""
        return self._params.pooling is Pooling.MEAN

    def add(self, first_position: int, hidden: torch.Tensor) -> None:
        """Takes hidden [rows, size] of the tokens from `first_position` on."""
        new = hidden[max(0, self._covered - first_position) :].cpu().double()
        if not len(new):
            return
        if not self.needs_all:
            self._state = new[-1]
        else:
            before = self._state if self._covered else torch.zeros_like(new[0])
            # A running sum is taken strictly in order, whatever the number of rows.
            self._state = torch.cat([before[None], new]).cumsum(0)[-1]
        self._covered = first_position + len(hidden)

    def vector(self) -> list[float]:
        """The embedding, of length 1 where that is asked for. Raises ValueError where it is no finite vector."""
        vector = self._state / self._covered if self.needs_all else self._state
        if not bool(vector.isfinite().all()):
            raise ValueError("the model's hidden states hold NaN or infinity")
        if self._params.normalize:
            vector = vector / vector.norm().clamp(min=1e-12)
        values: list[float] = vector.float().tolist()
        return values
