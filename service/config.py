"""Configuration that the launcher hands to loaders and workers. Torch-free: the launcher makes it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from service.models.packing import Quantization


@dataclass(frozen=True)
class ServiceConfig:
    """What to serve and how. Sizes are bytes, times seconds.

    `backend` is "cpu" or "torch"; `quantize` is "int8", "int4" or "". `max_context_length` 0 takes the model's own.
    `asked_model` and `asked_context_length` are as the operator gave them, for the next time that weights are loaded.
    `socket_dir` holds the unix sockets of each worker. Worker i also listens on `worker_ports` + i, unless that is None;
    0 lets each pick a free port. After `self_request_interval` without an answered call a worker asks itself; one that is
    silent for `hang_timeout` is replaced; 0 turns either off.
    """

    model_dir: str
    model_name: str
    host: str
    port: int
    socket_dir: str
    dtype: str = "auto"
    backend: str = "torch"
    quantize: str = ""
    quantize_group: int = 0
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    max_context_length: int = 0
    max_batch_tokens: int = 512
    max_sequences: int = 64
    max_queue: int = 256
    prefix_caching: bool = True
    drain_timeout: float = 30.0
    max_message_bytes: int = 64 * 1024 * 1024
    channelz: bool = False
    worker_ports: int | None = None
    asked_model: str = ""
    asked_context_length: int = 0
    self_request_interval: float = 0.0
    hang_timeout: float = 0.0

    def to_json(self) -> str:
        """For the zygote, which passes it on unread."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServiceConfig:
        """Inverse of `to_json`."""
        return cls(**json.loads(text))

    @property
    def quantization(self) -> Quantization | None:
        """How the loader rounds weights; None where it does not."""
        return Quantization(self.quantize, self.quantize_group) if self.quantize else None

    def worker_socket(self, generation: int, row: int) -> str:
        """Path of the unix socket of the worker that has a row of the board: no two live at once on one path."""
        return f"{self.socket_dir}/worker-{generation}.{row}.sock"

    def relay_socket(self, generation: int, row: int) -> str:
        """Path of the socket on which a worker takes requests from siblings, which serve the same generation."""
        return f"{self.socket_dir}/relay-{generation}.{row}.sock"

    def worker_port(self, index: int) -> int | None:
        """The TCP port of a worker's own; None when it has none, 0 for any."""
        return self.worker_ports + index if self.worker_ports else self.worker_ports
