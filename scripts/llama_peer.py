"""llama.cpp for scripts/bench_cpu: answers requests, one JSON object a line, with how long things took.

Runs in a virtual environment of its own, which holds llama-cpp-python and numpy alone. Prompts are token ids; the next
tokens are the likeliest ones, picked by llama.cpp's own greedy sampler.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import llama_cpp
import numpy as np

BATCH_TOKENS = 2048


class LlamaModel:
    """A GGUF file, and contexts over it for as many sequences as are asked for."""

    def __init__(self, path: str, threads: int) -> None:
        params = llama_cpp.llama_model_default_params()
        self._threads = threads
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot read {path}")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._context: Any = None
        self._shape: tuple[int, int] | None = None

    def generate(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """All prompts, then `new_tokens` for each, a token of every sequence in each step.

        `prefill_s` ends with the first token of the last sequence; `steps_s` is how long each further step took.
        """
        streams = len(prompts)
        self._open(streams, max(map(len, prompts)) + new_tokens)
        sampler = llama_cpp.llama_sampler_init_greedy()
        began = time.perf_counter()
        last = [self._prefill(number, prompt, sampler) for number, prompt in enumerate(prompts)]
        prefilled = time.perf_counter()
        answers = [[token] for token in last]
        steps = []
        for step in range(new_tokens - 1):
            started = time.perf_counter()
            for number, token in enumerate(last):
                self._put(number, token, len(prompts[number]) + step, number, True)
            self._decode(streams)
            last = [
                llama_cpp.llama_sampler_sample(sampler, self._context, number) for number in range(streams)
            ]
            steps.append(time.perf_counter() - started)
            for answer, token in zip(answers, last, strict=True):
                answer.append(token)
        llama_cpp.llama_sampler_free(sampler)
        return {"prefill_s": prefilled - began, "steps_s": steps, "answers": answers}

    def score(self, windows: list[list[int]]) -> dict[str, Any]:
        """The sum of -log p of every token of the windows but the first of each, and how many those are."""
        total, count = 0.0, 0
        for window in windows:
            self._open(1, len(window))
            for place, token in enumerate(window):
                self._put(place, token, place, 0, True)
            self._decode(len(window))
            size = len(window) * self._vocab_size
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), shape=(size,))
            logits = logits.reshape(len(window), self._vocab_size)[:-1].astype(np.float64)
            top = logits.max(axis=1, keepdims=True)
            norm = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
            total += float((norm - logits[np.arange(len(window) - 1), window[1:]]).sum())
            count += len(window) - 1
        return {"nll": total, "tokens": count}

    def _open(self, streams: int, length: int) -> None:
        """An empty context; the last one is kept where it fits."""
        # Sequences get equal parts of a context, each in whole blocks of 256 cells.
        shape = streams, -(-length // 256) * 256
        if self._shape != shape:
            if self._context is not None:
                llama_cpp.llama_free(self._context)
            params = llama_cpp.llama_context_default_params()
            params.n_ctx = streams * shape[1]
            params.n_seq_max = streams
            params.n_batch = BATCH_TOKENS
            params.n_ubatch = 512
            params.n_threads = params.n_threads_batch = self._threads
            params.kv_unified = False
            self._context = llama_cpp.llama_init_from_model(self._model, params)
            if not self._context:
                raise RuntimeError(f"llama.cpp makes no context for {streams} sequences of {shape[1]}")
            self._shape = shape
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)

    def _prefill(self, number: int, prompt: list[int], sampler: Any) -> int:
        for start in range(0, len(prompt), BATCH_TOKENS):
            piece = prompt[start : start + BATCH_TOKENS]
            for place, token in enumerate(piece):
                self._put(place, token, start + place, number, start + place == len(prompt) - 1)
            self._decode(len(piece))
        return int(llama_cpp.llama_sampler_sample(sampler, self._context, -1))

    def _put(self, place: int, token: int, position: int, sequence: int, wants_logits: bool) -> None:
        batch = self._batch
        batch.token[place] = token
        batch.pos[place] = position
        batch.n_seq_id[place] = 1
        batch.seq_id[place][0] = sequence
        batch.logits[place] = wants_logits

    def _decode(self, count: int) -> None:
        self._batch.n_tokens = count
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status != 0:
            raise RuntimeError(f"llama_decode failed with status {status}")
        llama_cpp.llama_synchronize(self._context)


def quantize(source: str, target: str, kind: str, threads: int) -> None:
    """Rounds a GGUF file to "q8_0" or "q4_0" with llama.cpp's own code."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = {"q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}[
        kind
    ]
    params.nthread = threads
    if llama_cpp.llama_model_quantize(source.encode(), target.encode(), params) != 0:
        raise RuntimeError(f"llama.cpp cannot round {source} to {kind}")


def main() -> int:
    """Quantises, or serves requests on standard input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--quantize", nargs=2, metavar=("KIND", "TARGET"), help="write a file and end")
    options = parser.parse_args()
    if options.quantize:
        quantize(options.model, options.quantize[1], options.quantize[0], options.threads)
        return 0
    model = LlamaModel(options.model, options.threads)
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(model, request.pop("call"))(**request)
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
