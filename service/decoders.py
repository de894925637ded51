"""Opens the decoder that a segment's layout asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from placement.file_segment import AnySegment, FileSegment
from service.backends import PANELS, ROWS
from service.kernels.library import KernelError, KernelPool, load
from service.loader.file_weights import file_tensors
from service.models.config import ModelConfig
from service.models.decoder import Decoder
from service.models.native_decoder import NativeDecoder
from service.models.native_weights import native_weights
from service.ops.torch_ops import TorchOps, Weight


def weight_tensors(segment: AnySegment) -> Mapping[str, Weight]:
    """Tensors over the read-only pages of a segment that is not packed."""
    if isinstance(segment, FileSegment):
        return file_tensors(segment)
    views = segment.views()
    return {
        entry.name: torch.frombuffer(views[entry.name], dtype=getattr(torch, entry.dtype)).view(entry.shape)
        for entry in segment.manifest.tensors
    }


def open_decoder(config: ModelConfig, segment: AnySegment, cpus: Sequence[int]) -> Decoder | NativeDecoder:
    """The decoder over the segment's weights, computing on `cpus`. To be called after the last fork.

    Raises ValueError for a layout that this program does not know, KernelError where the kernels cannot run.
    """
    if isinstance(segment, FileSegment) or segment.manifest.layout == ROWS:
        return Decoder(config, weight_tensors(segment), TorchOps())
    if segment.manifest.layout.split()[0] != PANELS:
        raise ValueError(f"the segment's layout is {segment.manifest.layout!r}, which no backend here reads")
    library = load()
    if library is None:
        raise KernelError("the segment's weights are packed for the native kernels, which are not there")
    # The sampler's operations are small; threads of torch's own would spin on the kernels' CPUs.
    torch.set_num_threads(1)
    pool = KernelPool(library, cpus=cpus)
    return NativeDecoder(config, native_weights(segment.manifest.tensors, segment.views()), pool)
