"""Packed weights as the kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from service.kernels.layout import FORMATS
from service.kernels.structures import Weight

__all__ = ["FORMATS", "PackedWeight"]


@dataclass(frozen=True)
class PackedWeight:
    """A weight [rows, columns] in the panels that packed.h describes.

    data uint8 [nbytes], contiguous; `format` is a key of FORMATS; `group` columns share a scale, 0: all of a row.
    Raises ValueError where data is too small or of another kind.
    """

    data: torch.Tensor
    rows: int
    columns: int
    format: str
    group: int
    nbytes: int

    def __post_init__(self) -> None:
        data = self.data
        if data.dtype != torch.uint8 or not data.is_contiguous() or data.numel() < self.nbytes:
            raise ValueError(
                f"packed weight: must be contiguous uint8 of {self.nbytes} bytes, not {data.dtype} of {data.numel()}"
            )

    @property
    def is_exact_in_bfloat16(self) -> bool:
        """Whether bfloat16 holds the weights as they are, but for one scale of each row."""
        return self.format == "bfloat16" or (self.format == "int8" and self.group == 0)

    def as_struct(self) -> Weight:
        """For a call; valid while this object lives."""
        return Weight(self.data.data_ptr(), self.rows, self.columns, FORMATS[self.format], self.group)
