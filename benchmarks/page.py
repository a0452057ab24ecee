"""docs/performance.md from what the scripts of this folder have kept in build/bench.

make bench
"""

import json
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from side_by_side import ROUNDS, Row

HERE = Path(__file__).parent
KEPT, PAGE = HERE.parent / "build" / "bench", HERE.parent / "docs" / "performance.md"
SCRIPTS = ("predict", "score", "tuning", "memory", "importing")


def table(rows: list[Row]) -> Iterator[str]:
    """A line for each case and comparison, with one column for each number of threads."""
    numbers = sorted({row.threads for row in rows})
    heads = [f"{n} thread{'s' if n > 1 else ''}" for n in numbers]
    yield "| case | beside | limit | " + " | ".join(heads) + " | memory |"
    yield "|---|---|---|" + "---:|" * (len(heads) + 1)
    groups: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        groups.setdefault((row.case, row.comparison), {})[row.threads] = row
    for (case, comparison), by_threads in groups.items():
        first = next(iter(by_threads.values()))
        cells = [ratio(by_threads[n]) if n in by_threads else "" for n in numbers]
        memory = [row.memory for row in by_threads.values() if row.memory is not None]
        peak = f"{max(memory):.0f} MB" if memory else ""
        note = f"; {first.note}" if first.note else ""
        yield f"| {case}{note} | {comparison} | {first.limit} | {' | '.join(cells)} | {peak} |"


def ratio(row: Row) -> str:
    """What was measured, and whether it is within the limit."""
    faster = row.least is not None or (row.most is None and row.sense == "least")
    text = f"{row.ratio:.3g}×" if row.ratio < 100 else f"{row.ratio:,.0f}×"
    text += " faster" if faster else ""
    return f"**{text}, missed**" if row.met is False else text


def text() -> Iterator[str]:
    yield (
        (HERE / "page.md")
        .read_text(encoding="utf-8")
        .format(rounds=ROUNDS, torch=torch.__version__.partition("+")[0], python=platform.python_version())
    )
    for name in SCRIPTS:
        file = KEPT / f"{name}.json"
        if not file.exists():
            raise SystemExit(f"{file}: missing; run benchmarks/{name}.py --json {file}")
        kept = json.loads(file.read_text(encoding="utf-8"))
        yield f"\n## {kept['title']}\n"
        yield kept["about"] + "\n"
        yield from table([Row(**row) for row in kept["rows"]])


if __name__ == "__main__":
    PAGE.write_text("\n".join(text()) + "\n", encoding="utf-8")
    print(PAGE)
