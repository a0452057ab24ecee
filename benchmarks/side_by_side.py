"""Jobs that take turns in one process, as ratios: what every script in this folder measures and prints with.

A machine's own speed says little and its neighbours change it from second to second, so each round runs every job once
and a ratio is taken within the round; what is printed is the median of the rounds.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROUNDS = 7
_SHORTEST = 0.02  # seconds of a job in a round: shorter ones run several times

Job = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One line of the table: ours beside a comparison, with the limit that the ratio has to keep."""

    case: str
    threads: int
    comparison: str
    ours: float  # seconds
    theirs: float  # seconds
    ratio: float  # ours/theirs where `most` is set, theirs/ours where `least` is
    most: float | None = None  # the ratio may be at most this
    least: float | None = None  # or must be at least this
    sense: str = "most"  # or "least": which way the ratio goes
    memory: float | None = None  # MB that ours needed beyond input and output, at its peak
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the limit is kept; None without one."""
        if self.most is not None:
            return self.ratio <= self.most
        return None if self.least is None else self.ratio >= self.least

    @property
    def limit(self) -> str:
        """The limit in words."""
        if self.most is not None:
            return f"≤ {self.most:g}×"
        return "" if self.least is None else f"≥ {self.least:g}× faster"


def rounds(jobs: dict[str, Job], *, number: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds of each job in each round; the first round warms up and is not counted."""
    calls = {name: max(1, round(_SHORTEST / max(_seconds(job), 1e-9))) for name, job in jobs.items()}
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(number):
        for name, job in jobs.items():
            start = time.perf_counter()
            for _ in range(calls[name]):
                job()
            taken[name].append((time.perf_counter() - start) / calls[name])
    return taken


def _seconds(job: Job) -> float:
    job()
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def compare(
    case: str,
    ours: Job,
    others: dict[str, tuple[Job, str, float | None]],
    *,
    scale: dict[str, float] | None = None,
    memory: bool = True,
    note: str = "",
    number: int = ROUNDS,
) -> list[Row]:
    """Rows of one case: ours beside each of the others, all taking turns.

    `others` maps a name to the job, "most" or "least", and the limit (None: no limit). `scale` multiplies the time of
    a comparison of which only a part is run.
    """
    taken = rounds({"ours": ours, **{name: job for name, (job, _, _) in others.items()}}, number=number)
    peak = peak_memory(ours) if memory else None
    made = []
    for name, (_, sense, limit) in others.items():
        theirs = [seconds * (scale or {}).get(name, 1.0) for seconds in taken[name]]
        pairs = zip(taken["ours"], theirs, strict=True)
        ratio = statistics.median(a / b if sense == "most" else b / a for a, b in pairs)
        made.append(
            Row(
                case, torch.get_num_threads(), name, statistics.median(taken["ours"]), statistics.median(theirs), ratio,
                **{sense: limit}, sense=sense, memory=peak, note=note,
            )
        )  # fmt: skip
    return made


def cpu_seconds(job: Job, calls: int = 1) -> float:
    """CPU time of one call, in all threads: what neighbours do counts less than by the clock."""
    start = time.process_time()
    for _ in range(calls):
        job()
    return (time.process_time() - start) / calls


def threads(numbers: Sequence[int] = (1, 2)) -> Iterator[int]:
    """Set torch to each number of threads in turn."""
    for number in numbers:
        torch.set_num_threads(number)
        yield number


def peak_memory(job: Job) -> float | None:
    """MB that a job holds at its peak beyond what was there before and what it returns; None where Linux is missing."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not clear.exists():
        return None

    def kilobytes(field: str) -> int:
        return int(next(line for line in status.read_text().splitlines() if line.startswith(field)).split()[1])

    job()  # what is loaded or cached on a first call is not the kernel's
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        clear.write_text("5")  # the high-water mark starts anew
    except OSError:
        return None
    before = kilobytes("VmRSS")
    result = job()
    return max(0.0, (kilobytes("VmHWM") - before) * 1024 - _size(result)) / 1e6


def _size(result: Any) -> int:
    if isinstance(result, Tensor):
        return result.numel() * result.element_size()
    if isinstance(result, (tuple, list)):
        return sum(map(_size, result))
    return int(getattr(result, "nbytes", 0))


def main(title: str, cases: Callable[[], Iterator[Row]]) -> None:
    """Print the rows as they come; `--json FILE` keeps them, and the script's docstring, for docs/performance.md."""
    about = (sys.modules["__main__"].__doc__ or "").partition("\n\npython ")[0].strip()
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    print(f"{title}\n{'case':34} {'thr':>3} {'ours':>10} {'comparison':>38} {'ratio':>8} {'limit':>14} {'memory':>8}")
    kept = []
    for row in cases():
        kept.append(row)
        verdict = {True: "", False: " MISSED", None: ""}[row.met]
        memory = "" if row.memory is None else f"{row.memory:.0f} MB"
        theirs = f"{row.comparison} {1e3 * row.theirs:.3g} ms"
        print(
            f"{row.case:34} {row.threads:3d} {1e3 * row.ours:7.3g} ms {theirs:>38} {row.ratio:7.3g}× {row.limit:>14} "
            f"{memory:>8}{verdict} {row.note}"
        )
        sys.stdout.flush()
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps({"title": title, "about": about, "rows": [asdict(row) for row in kept]}, indent=1)
        )
