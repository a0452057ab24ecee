"""What `import igeood` with `igeood.black_box` adds to `import torch`, and what `igeood --help` takes of it.

Each measurement is a process of its own, which tells its own seconds; they take turns. The row's ratio is what we take,
of `import torch` in the same round; its note has the seconds that we add to it, at most 0.15.

python benchmarks/importing.py
"""

import statistics
import subprocess
import sys
from collections.abc import Iterator

from side_by_side import ROUNDS, Row, main

LIMIT = 0.15  # seconds
_TIMED = "import contextlib, time; start = time.perf_counter()\n{}\nprint(time.perf_counter() - start)"
SCRIPTS = {
    "import torch": _TIMED.format("import torch"),
    "import igeood": _TIMED.format("import torch; start = time.perf_counter(); import igeood; igeood.black_box"),
    "igeood --help": _TIMED.format(
        "from igeood.cli import main\nwith contextlib.suppress(SystemExit): main(['--help'])"
    ),
}


def seconds(script: str) -> float:
    """Of a script, by its own clock: starting Python is nobody's doing."""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)  # noqa: S603
    return float(found.stdout.splitlines()[-1])


def cases() -> Iterator[Row]:
    taken: dict[str, list[float]] = {name: [] for name in SCRIPTS}
    for turn in range(ROUNDS + 1):  # the first one fills the disk's cache
        for name, script in SCRIPTS.items():
            taken[name] += [seconds(script)] if turn else []
    torch = taken["import torch"]
    for name in ("import igeood", "igeood --help"):
        ours = statistics.median(taken[name])
        ratio = statistics.median(a / b for a, b in zip(taken[name], torch, strict=True))
        most = round(LIMIT / statistics.median(torch), 2)
        note = f"{ours:.2f} s, at most {LIMIT:g} s"
        yield Row(name, 1, "import torch", ours, statistics.median(torch), ratio, most=most, note=note)


if __name__ == "__main__":
    main("Import", cases)
