"""The tables of scripts/bench_cpu: medians of what was measured, and how they stand to what must hold."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from machine_limits import MachineLimits
from model_work import model_work

# Served decode and prefill over llama.cpp's: (ours, theirs, streams or 0 for prefill, at least, goal).
RATIOS = (
    ("bf16", "bf16", 0, 1.8, 2.2),
    ("bf16", "bf16", 1, 1.1, 1.2),
    ("bf16", "bf16", 8, 2.0, 2.4),
    ("bf16", "bf16", 32, 1.8, 2.3),
    ("int8", "q8_0", 1, 1.3, 1.6),
    ("int8", "q8_0", 8, 2.0, 2.5),
    ("int8", "q8_0", 32, 1.8, 2.5),
    ("int4", "q4_0", 1, 1.5, 1.5),
    ("int4", "q4_1", 1, 1.5, 1.5),
)


@dataclass(frozen=True)
class Sample:
    """One measurement; rates of decoding in tokens per second, 0 where a single token was asked for."""

    part: str
    subject: str
    streams: int
    prompt: int
    prefill_s: float
    decode_rate: float


@dataclass
class Report:
    """Everything measured. `perplexity`: the sum of -log p and the number of tokens, by subject."""

    prompt: int
    long_prompt: int
    load_before: float
    load_after: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    limits: list[MachineLimits] = field(default_factory=list)
    perplexity: dict[str, tuple[float, int]] = field(default_factory=dict)
    answers: dict[str, list[list[int]]] = field(default_factory=dict)

    def prefill(self, subject: str, streams: int, prompt: int, part: str = "speed") -> float | None:
        """Median prompt tokens per second until all streams had their first token."""
        rates = [
            each.streams * each.prompt / each.prefill_s for each in self._of(subject, streams, prompt, part)
        ]
        return statistics.median(rates) if rates else None

    def decode(self, subject: str, streams: int, prompt: int, part: str = "speed") -> float | None:
        """Median tokens per second of all streams."""
        rates = [each.decode_rate for each in self._of(subject, streams, prompt, part) if each.decode_rate]
        return statistics.median(rates) if rates else None

    def ratio(self, ours: str, theirs: str, streams: int, prompt: int) -> float | None:
        """The median of the rounds' ratios: both of a round met about the same machine. `streams` 0: prefill."""
        mine = self._of(ours, streams or 1, prompt, "speed")
        other = self._of(theirs, streams or 1, prompt, "speed")
        pairs = [
            (a.decode_rate / b.decode_rate if streams else b.prefill_s / a.prefill_s)
            for a, b in zip(mine, other, strict=False)
            if not streams or b.decode_rate
        ]
        return statistics.median(pairs) if pairs else None

    def subjects(self, part: str) -> list[str]:
        """Their names, in the order in which they came first."""
        return list(dict.fromkeys(each.subject for each in self.samples if each.part == part))

    def _of(self, subject: str, streams: int, prompt: int, part: str) -> list[Sample]:
        wanted = (part, subject, streams, prompt)
        return [
            each for each in self.samples if (each.part, each.subject, each.streams, each.prompt) == wanted
        ]


def print_report(report: Report, model: Path, cpus: list[int]) -> None:
    """Everything there is, on standard output."""
    print(
        f"{model.name}, {len(cpus)} cores, load average {report.load_before:.1f} to {report.load_after:.1f}"
    )
    if report.samples:
        _print_speed(report)
        _print_ratios(report)
    if report.limits and report.decode("numaserve bf16", 1, report.prompt):
        _print_limits(report, model)
    _print_context(report)
    _print_perplexity(report)


def _print_speed(report: Report) -> None:
    prompt = report.prompt
    counts = sorted(
        {each.streams for each in report.samples if each.part == "speed" and each.prompt == prompt}
    )
    heads = [f"prefill {length}" for length in (prompt, report.long_prompt)] + [
        f"decode B={count}" for count in counts
    ]
    print(f"\n{'tokens/s':20}" + "".join(f"{head:>14}" for head in heads))
    for subject in report.subjects("speed"):
        cells = [report.prefill(subject, 1, length) for length in (prompt, report.long_prompt)]
        cells += [report.decode(subject, count, prompt) for count in counts]
        print(f"{subject:20}" + "".join(f"{'-' if cell is None else f'{cell:.1f}':>14}" for cell in cells))


def _print_ratios(report: Report) -> None:
    prompt = report.prompt
    print(f"\n{'over llama.cpp':34}{'ratio':>8}{'at least':>10}{'goal':>8}")
    for ours, theirs, streams, least, goal in RATIOS:
        ratio = report.ratio(f"numaserve {ours}", f"llama.cpp {theirs}", streams, prompt)
        if ratio is not None:
            what = f"decode B={streams}" if streams else f"prefill {prompt}"
            met = (
                "goal met" if ratio >= goal else "met" if ratio >= least else f"missed by {least - ratio:.2f}"
            )
            print(f"{f'{ours} / {theirs}, {what}':34}{ratio:8.2f}{least:10.1f}{goal:8.1f}  {met}")
    _print_agreement(report)


def _print_agreement(report: Report) -> None:
    """That both compute the same model: how many first tokens of the same prompts are the same."""
    mine, other = (report.answers.get(f"{name} bf16", []) for name in ("numaserve", "llama.cpp"))
    if mine and other:
        same = sum(a[0] == b[0] for a, b in zip(mine, other, strict=True))
        print(f"first tokens of numaserve bf16 that are llama.cpp's: {same} of {len(mine)}")


def _print_limits(report: Report, model: Path) -> None:
    prompt = report.prompt
    reading = statistics.median(each.read_bytes for each in report.limits)
    computing = statistics.median(each.operations for each in report.limits)
    print(f"\nmachine: reads {reading / 1e9:.1f} GB/s, fused multiply-adds {computing / 1e9:.0f} GFLOP/s")
    for subject in report.subjects("speed"):
        name, _, format = subject.partition(" ")
        if name != "numaserve":
            continue
        work = model_work(model, format)
        decode, prefill = report.decode(subject, 1, prompt), report.prefill(subject, 1, report.long_prompt)
        shares = []
        if decode is not None:
            used = decode * work.token_bytes(prompt)
            shares.append(f"B=1 reads {used / 1e9:.1f} GB/s, {used / reading:.0%}")
        if prefill is not None:
            used = prefill / report.long_prompt * work.prompt_operations(report.long_prompt)
            shares.append(
                f"prefill {report.long_prompt} does {used / 1e9:.0f} GFLOP/s, {used / computing:.0%}"
            )
        print(f"{subject:20}{'; '.join(shares)}")


def _print_context(report: Report) -> None:
    own = [each for each in report.samples if each.part == "context"]
    if not own:
        return
    streams = own[0].streams
    short, long = sorted({each.prompt for each in own})
    print(
        f"\n{'contexts, B=' + str(streams):20}{f'ms/step at {short}':>18}{f'at {long}':>12}{'attention':>12}"
    )
    for subject in report.subjects("context"):
        rates = [report.decode(subject, streams, length, "context") for length in (short, long)]
        if all(rates):
            steps = [streams / rate * 1e3 for rate in rates if rate]
            print(f"{subject:20}{steps[0]:18.1f}{steps[1]:12.1f}{steps[1] - steps[0]:12.1f}")


def _print_perplexity(report: Report) -> None:
    if not report.perplexity:
        return
    values = {name: math.exp(nll / tokens) for name, (nll, tokens) in report.perplexity.items()}
    base = values.get("numaserve bf16")
    tokens = next(iter(report.perplexity.values()))[1]
    print(f"\nperplexity over {tokens} tokens")
    for name, value in values.items():
        change = f"{value / base - 1:+.2%} of numaserve bf16" if base else ""
        print(f"{name:20}{value:10.3f}  {change}")
