"""What `fit` and `score` hold at their peak, whatever the number of rows.

`fit`: rows of 100 logits and two layers of 256, in blocks that are made as they are read, with a budget of 64 MiB; the
ratio is the growth of the peak from 50,000 to 500,000 rows, of 32 MB. `score`: the peak beyond the input and the
scores, of 128 MB. Each measurement is a process of its own.

python benchmarks/memory.py
"""

import subprocess
import sys
from collections.abc import Iterator

from side_by_side import Row, main

COMMON = """
import ctypes, sys, time, torch, igeood
from igeood import Outputs
from side_by_side import peak_memory
ctypes.CDLL(None).mallopt(-3, 1 << 20)  # freed blocks of 1 MB and more go back at once
torch.set_num_threads(1)

def block(start, n, classes, widths):
    draw = torch.Generator().manual_seed(start)
    labels = (start + torch.arange(n)) % classes
    logits = torch.randn(n, classes, generator=draw)
    logits[torch.arange(n), labels] += 6.0
    features = {f"layer{i}": torch.randn(n, width, generator=draw) for i, width in enumerate(widths)}
    return Outputs(logits, features, labels)

def report(job):
    start = time.process_time()
    held = peak_memory(job)
    print(held, time.process_time() - start)
"""
FIT = """
rows = int(sys.argv[1])
def job():
    blocks = (block(i, 1000, 100, (256, 256)) for i in range(0, rows, 1000))
    igeood.white_box(method="igeood").fit(blocks, budget=64 << 20)
report(job)
"""
SCORE = """
method, rows, classes, *widths = sys.argv[1], *map(int, sys.argv[2:])
train, data = block(0, 4 * classes, classes, widths), block(9, rows, classes, widths)
guard = (igeood.white_box if widths else igeood.black_box)(method=method).fit(train)
report(lambda: guard.score(data))
"""
SCORED = {
    "igeood-logits": (("2000000", "10"), ("20000", "1000")),
    "energy": (("2000000", "10"),),
    "igeood": (("20000", "1000", "512"),),
    "mahalanobis": (("20000", "100", "2048"),),
}


def measured(script: str, *arguments: str) -> tuple[float, float]:
    """MB held and CPU seconds, as a process reports them."""
    command = [sys.executable, "-c", COMMON + script, *arguments]
    folder = __file__.rpartition("/")[0] or "."
    text = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout  # noqa: S603
    held, seconds = map(float, text.split()[-2:])
    return held, seconds


def cases() -> Iterator[Row]:
    few, _ = measured(FIT, "50000")
    many, seconds = measured(FIT, "500000")
    note = f"{few:.0f} MB at 50,000 rows, {many:.0f} MB at 500,000"
    grown = max(0.0, many - few)
    yield Row("fit, budget 64 MiB", 1, "32 MB more", seconds, seconds, grown / 32.0, most=1.0, memory=many, note=note)
    for method, sizes in SCORED.items():
        for size in sizes:
            held, seconds = measured(SCORE, method, *size)
            case = f"score, {method}, {' × '.join(f'{int(n):,}' for n in size)}"
            yield Row(case, 1, "128 MB", seconds, seconds, held / 128.0, most=1.0, memory=held)


if __name__ == "__main__":
    main("Memory", cases)
