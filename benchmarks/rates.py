"""Microseconds of one core for a row that is summed up and scored by the command line, and hours for very many rows.

The difference between two files of unequal length counts: starting a process is not a row's. A merge of summaries that
are full is timed too.

python benchmarks/rates.py --classes 1000 --total 1000000000 --machines 100
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile

import numpy as np

import igeood


def cpu_seconds(*words: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "igeood.cli", *words], check=True, capture_output=True, env=environment)  # noqa: S603
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def write_inputs(rows: int, classes: int) -> None:
    draw = np.random.default_rng(0)

    def logits(n: int) -> tuple[np.ndarray, np.ndarray]:
        labels = draw.integers(0, classes, n)
        values = draw.standard_normal((n, classes), dtype=np.float32)
        values[np.arange(n), labels] += 8
        return values, labels

    for name, n in (("few", rows // 4), ("many", rows), ("held", 5000)):
        igeood.write_logits(f"{name}.parquet", *logits(n))
    subprocess.run([sys.executable, "-m", "igeood.cli", "fit", "few.parquet", "--out", "g"], check=True)
    subprocess.run([sys.executable, "-m", "igeood.cli", "calibrate", "g", "held.parquet"], check=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("classes", 1000), ("rows", 100_000), ("total", 10**9), ("machines", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    rows, share = given.rows - given.rows // 4, given.total / given.machines
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_inputs(given.rows, given.classes)
        ways = {
            "fit --summary": lambda name: cpu_seconds("fit", f"{name}.parquet", "--summary", f"{name}.sum"),
            "score": lambda name: cpu_seconds("score", "g", f"{name}.parquet", "--out", f"{name}.out.parquet"),
        }
        for way, run in ways.items():
            micro = 1e6 * (run("many") - run("few")) / rows
            print(f"{way:14}{micro:8.1f} µs a row: {share * micro / 6e7:.0f} minutes for {share:,.0f} rows", flush=True)
        copies = [shutil.copy("many.sum", f"copy-{i}.sum") for i in range(8)]
        two, eight = (cpu_seconds("merge", *copies[:n], "--summary", "total", "--force") for n in (2, 8))
        print(f"merge         {(eight - two) / 6:8.2f} s a summary: {given.machines * (eight - two) / 360:.1f} minutes")
        print(f"fit of a sum  {cpu_seconds('merge', 'many.sum', '--out', 'new'):8.1f} s")
        os.chdir("/")


if __name__ == "__main__":
    main()
