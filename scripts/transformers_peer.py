"""transformers for scripts/bench_cpu: the same requests and answers as scripts/llama_peer.py, in a process of its own."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM


class TransformersModel:
    """A checkpoint in eager mode with transformers' own cache; prompts of one call are of one length."""

    def __init__(self, path: str, dtype: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
        """All prompts as one batch, then `new_tokens` for each, greedily. See llama_peer."""
        began = time.perf_counter()
        out = self._model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        last = out.logits[:, -1].argmax(-1)
        prefilled = time.perf_counter()
        answers, steps = [last], []
        for _ in range(new_tokens - 1):
            started = time.perf_counter()
            out = self._model(last[:, None], past_key_values=out.past_key_values, use_cache=True)
            last = out.logits[:, -1].argmax(-1)
            answers.append(last)
            steps.append(time.perf_counter() - started)
        tokens = torch.stack(answers, 1).tolist()
        return {"prefill_s": prefilled - began, "steps_s": steps, "answers": tokens}


def main() -> int:
    """Serves requests on standard input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder in Hugging Face layout")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights (default: %(default)s)")
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = TransformersModel(options.model, options.dtype)
    print(json.dumps({"version": transformers.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        answer = getattr(model, request.pop("call"))(**request)
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
