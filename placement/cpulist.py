"""Lists of CPUs and nodes: the kernel's syntax (`0-3,8`) and numactl's (`all`, `!0`, `+0`, `0-6:2`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_RANGE = re.compile(r"(\d+)(?:-(\d+))?(?::(\d+)(?:/(\d+))?)?")
_HIGHEST_ID = 1 << 16


class ListError(ValueError):
    """A list that cannot be read. `subject` is the flag or file it came from."""

    def __init__(self, subject: str, reason: str):
        super().__init__(f"{subject}: {reason}")
        self.subject = subject
        self.reason = reason


def parse_kernel_list(text: str, source: str = "list") -> tuple[int, ...]:
    """Read the kernel's list format (cpuset(7), "List format"), also with groups (`0-31:2/8`). Empty text is
    the empty list.

    Returns the ids in ascending order. Raises ListError naming `source` and the part at fault.
    """
    stripped = text.strip()
    if not stripped:
        return ()
    return _sorted(
        member for part in stripped.split(",") for member in _expand(part.strip(), source, text.strip())
    )


def parse_numactl_list(
    text: str, flag: str, members: Sequence[int], relative_to: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Read a list as numactl(8) takes it: `0,2-3`, `0-6:2` (every second), `all`, `!0` (all but 0), `+0`
    (relative).

    `members` is what `all` stands for and what `!` takes away from. `+N` is the N-th entry of `relative_to`
    (the ids in the current cpuset; `members` where None). An absolute id is not checked against either:
    whether it exists and may be used is for the caller to judge. Returns ids in ascending order. Raises
    ListError naming `flag`.
    """
    body = text.strip()
    inverted = body.startswith("!")
    if inverted:
        body = body[1:]
    relative = body.startswith("+")
    if relative:
        body = body[1:]
    if not body:
        raise ListError(flag, f"empty list {text!r}")
    chosen: list[int] = []
    for part in body.split(","):
        word = part.strip()
        if word == "all":
            chosen.extend(members if not relative else (relative_to if relative_to is not None else members))
            continue
        ids = _expand(word, flag, text)
        if relative:
            ids = _absolute(ids, members if relative_to is None else relative_to, flag, word)
        chosen.extend(ids)
    if inverted:
        return _sorted(set(members) - set(chosen))
    return _sorted(chosen)


def format_list(ids: Iterable[int]) -> str:
    """Write ids in the kernel's list format: ascending, runs joined (`0-3,8`)."""
    parts: list[str] = []
    ordered = _sorted(ids)
    start = 0
    for end in range(1, len(ordered) + 1):
        if end < len(ordered) and ordered[end] == ordered[end - 1] + 1:
            continue
        first, last = ordered[start], ordered[end - 1]
        parts.append(str(first) if first == last else f"{first}-{last}")
        start = end
    return ",".join(parts)


def _expand(part: str, subject: str, whole: str) -> list[int]:
    match = _RANGE.fullmatch(part)
    if not match:
        where = "" if part == whole else f" in {whole!r}"
        raise ListError(subject, f"cannot read {part!r}{where}; expected numbers and ranges such as 0,2-3")
    first = int(match[1])
    last = int(match[2]) if match[2] else first
    if last < first:
        raise ListError(subject, f"the range {part!r} runs backwards")
    if last >= _HIGHEST_ID:
        raise ListError(subject, f"{part!r} is beyond any CPU or node")
    if not match[3]:
        return list(range(first, last + 1))
    used, group = (int(match[3]), int(match[4])) if match[4] else (1, int(match[3]))
    if group < 1 or used < 1 or used > group:
        raise ListError(subject, f"the step in {part!r} must be at least 1")
    return [member for member in range(first, last + 1) if (member - first) % group < used]


def _absolute(ids: Iterable[int], base: Sequence[int], flag: str, part: str) -> list[int]:
    ordered = sorted(base)
    absolute = []
    for position in ids:
        if position >= len(ordered):
            raise ListError(
                flag, f"+{part} is relative to {format_list(ordered)}, which has {len(ordered)} entries"
            )
        absolute.append(ordered[position])
    return absolute


def _sorted(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(ids)))
