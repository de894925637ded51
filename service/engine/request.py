"""What is passed between the gRPC side and the engine: requests in, outputs back. Plain data, no behaviour."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

_arrival_order = itertools.count()


class FinishReason(enum.Enum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class StructuredKind(enum.Enum):
    """The kinds of constraint on an answer's form."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True)
class StructuredOutput:
    """A constraint: `text` is the schema, expression or grammar; `choices` the strings of a choice."""

    kind: StructuredKind
    text: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class SamplingParams:
    """How to pick tokens and when to stop. Values are validated before one of these is made.

    `temperature` 0 is greedy. `top_k` 0 keeps all. `seed` is always set: the server draws one when the client did not.
    `logprobs` None is off, 0 reports the chosen token alone.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_output: StructuredOutput | None = None


class Pooling(enum.Enum):
    """How the hidden states of a text become one vector: their mean, or that of the last token."""

    MEAN = "mean"
    LAST = "last"


@dataclass(frozen=True)
class EmbeddingParams:
    """What an embedding is to be; `normalize` gives it length 1."""

    pooling: Pooling = Pooling.MEAN
    normalize: bool = True


@dataclass(frozen=True)
class EngineRequest:
    """One request as the engine takes it. Times are `time.monotonic()` seconds.

    `lora_name` is empty for the base model. `arrival` orders requests of equal priority. With `embedding` set the
    prompt is embedded and nothing is generated; `params` then counts for nothing.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrived_at: float
    deadline: float | None = None
    priority: int = 0
    lora_name: str = ""
    embedding: EmbeddingParams | None = None
    arrival: int = field(default_factory=lambda: next(_arrival_order))


@dataclass(frozen=True)
class TokenLogprob:
    """One token's natural log probability, from the logits before penalties, temperature and filters.

    Rank 1 is the likeliest.
    """

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True)
class PositionLogprobs:
    """Log probabilities at one position; `chosen` is None for the first token of a prompt."""

    chosen: TokenLogprob | None
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class WorkerIdentity:
    """The process that ran a request: its number in the server, and the NUMA nodes whose weights it reads."""

    worker: int
    pid: int
    unit: str
    nodes: tuple[int, ...]


@dataclass(slots=True)
class RequestSummary:
    """The final counts and times of a whole request; `embedding` is empty but for an embedding request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    queued_seconds: float = 0.0
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0
    embedding: list[float] = field(default_factory=list)


@dataclass(slots=True)
class RequestOutput:
    """What one engine step (or several, when the client lags) added to one completion of a request.

    `text` and `token_ids` are new since the previous output of the same completion. `finish_reason` is set in a
    completion's last output, `summary` in the last output of the whole request. `served_by` is None when the worker that
    answers ran the request itself. One is made for each token of each stream: what few of them carry belongs elsewhere.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str = ""
    summary: RequestSummary | None = None
    served_by: WorkerIdentity | None = None

    @property
    def request_finished(self) -> bool:
        """Whether nothing more of the request will come."""
        return self.summary is not None


@dataclass(frozen=True)
class EngineStats:
    """A snapshot for the board and the metrics; counters only grow."""

    running: int = 0
    waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    requests: int = 0
    preemptions: int = 0
    steps: int = 0


class RequestRejected(ValueError):
    """The engine cannot ever run this request; `field` names the request field at fault (InferRequest's own name)."""

    def __init__(self, field_name: str, problem: str) -> None:
        super().__init__(f"{field_name}: {problem}")
        self.field = field_name
        self.problem = problem

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.field, self.problem)


class QueueFull(RuntimeError):
    """The waiting queue is at its limit; `retry_after_seconds` is an estimate of when there is room."""

    def __init__(self, waiting: int, limit: int, retry_after_seconds: float) -> None:
        super().__init__(f"{waiting} requests are waiting, the limit is {limit}")
        self.waiting = waiting
        self.limit = limit
        self.retry_after_seconds = retry_after_seconds

    def __reduce__(self) -> tuple[type, tuple[int, int, float]]:
        return type(self), (self.waiting, self.limit, self.retry_after_seconds)
