"""Matrix products whose rows do not depend on each other, bit for bit.

A BLAS picks its kernel, and with it the order of each sum, by the shape of the product, by the layout of the result and by
the number of threads. So rows are taken in tiles of a few fixed heights, and for each shape of weights it is tried
out once which heights give the same bits; the order of sums does not depend on the values that are summed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

TILE_ROWS = 4
_HEIGHTS = (64, 16, 4)
_PANEL_ELEMENTS = 1 << 20
# With fewer rows of weights a BLAS tends to split the sums over its threads.
_LEAST_PANEL_ROWS = 512


@dataclass(frozen=True)
class _Scheme:
    """How to multiply: heights of tiles, falling; whether BLAS gets to write the result transposed; with one thread or all.

    The layout of the result decides which operand BLAS takes for the left one, and so which kernels it has for few rows.
    """

    heights: tuple[int, ...]
    transposed: bool = False
    one_thread: bool = False


_PREFERENCES = (_Scheme(_HEIGHTS), _Scheme(_HEIGHTS, transposed=True), _Scheme(_HEIGHTS[:2]))
_LAST_RESORT = _Scheme(_HEIGHTS[-1:])


class RowStableLinear:
    """`x @ weight.T + bias` in float32 for weights of any floating type, panel by panel of a few MiB that stay in cache.

    Panels of narrower weights are widened into one buffer that is used again and again.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0)
        self._schemes: dict[tuple[int, int], _Scheme] = {}

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [rows, columns] float32, weight [n, columns], bias [n]. Returns [rows, n]."""
        rows, columns = x.shape
        count = weight.shape[0]
        out = torch.empty(rows, count)
        panels = max(1, count // max(_LEAST_PANEL_ROWS, _PANEL_ELEMENTS // columns))
        panel_rows = -(-count // panels)
        for start in range(0, count, panel_rows):
            panel = self._widen(weight[start : start + panel_rows])
            target = out[:, start : start + panel_rows]
            scheme = self._scheme(panel)
            with _one_thread() if scheme.one_thread else contextlib.nullcontext():
                for first, last in _tiles(rows, scheme.heights):
                    _multiply(x[first:last], panel, target[first:last], scheme)
        return out if bias is None else out.add_(bias)

    def _widen(self, panel: torch.Tensor) -> torch.Tensor:
        if panel.dtype == torch.float32:
            return panel
        if self._buffer.numel() < panel.numel():
            self._buffer = torch.empty(panel.numel())
        return self._buffer[: panel.numel()].view(panel.shape).copy_(panel)

    def _scheme(self, panel: torch.Tensor) -> _Scheme:
        shape = (panel.shape[0], panel.shape[1])
        if shape not in self._schemes:
            self._schemes[shape] = _try_out(panel)
        return self._schemes[shape]


def _tiles(rows: int, heights: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Cuts rows into tiles, the highest first; the last one may want rows that are not there."""
    first = 0
    for height in heights:
        while rows - first >= height:
            yield first, first + height
            first += height
    if first < rows:
        yield first, rows


def _multiply(x: torch.Tensor, panel: torch.Tensor, out: torch.Tensor, scheme: _Scheme) -> None:
    lacking = scheme.heights[-1] - len(x)
    if lacking > 0:
        padded = torch.nn.functional.pad(x, (0, 0, 0, lacking))
        out.copy_(_product(padded, panel, scheme.transposed)[: len(x)])
    elif scheme.transposed:
        out.copy_(_product(x, panel, transposed=True))
    else:
        torch.mm(x, panel.t(), out=out)


def _product(x: torch.Tensor, panel: torch.Tensor, transposed: bool) -> torch.Tensor:
    return torch.mm(panel, x.t()).t() if transposed else torch.mm(x, panel.t())


def _try_out(panel: torch.Tensor) -> _Scheme:
    """The first scheme whose heights all give the bits of its lowest one, with one thread and with as many as are set."""
    x = torch.randn(_HEIGHTS[0], panel.shape[1], generator=torch.Generator().manual_seed(0))
    with _one_thread():
        chosen, expected = _LAST_RESORT, _in_tiles(x, panel, _LAST_RESORT.heights[0], transposed=False)
        for scheme in _PREFERENCES:
            bits = _in_tiles(x, panel, scheme.heights[-1], scheme.transposed)
            if all(_agrees(x, panel, height, scheme.transposed, bits) for height in scheme.heights):
                chosen, expected = scheme, bits
                break
    kept = [height for height in chosen.heights if _agrees(x, panel, height, chosen.transposed, expected)]
    if chosen.heights[-1] not in kept:
        return _Scheme(chosen.heights, chosen.transposed, one_thread=True)
    return _Scheme(tuple(kept), chosen.transposed)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _agrees(
    x: torch.Tensor, panel: torch.Tensor, height: int, transposed: bool, expected: torch.Tensor
) -> bool:
    """Whether tiles of that height give these bits, whatever the place of a row in its tile."""
    moved = _in_tiles(x.roll(1, 0), panel, height, transposed).roll(-1, 0)
    return torch.equal(_in_tiles(x, panel, height, transposed), expected) and torch.equal(moved, expected)


def _in_tiles(x: torch.Tensor, panel: torch.Tensor, height: int, transposed: bool) -> torch.Tensor:
    return torch.cat([_product(tile, panel, transposed) for tile in x.split(height)])
