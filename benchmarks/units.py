"""Scores of 50 files: as one table, file by file, in processes, on Ray; and on Ray while processes are killed.

python benchmarks/units.py --rows 5000000 --kills 20
"""

import argparse
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

import igeood

FILES, CLASSES, PATIENCE = 50, 10, 1800
SCORE = [sys.executable, "-m", "igeood.cli", "score", "guard.safetensors", "in", "--out"]
RAY = ["--engine", "ray", "--workers", "2"]
WAYS = {
    "one table": ["one.parquet", "--force"],
    "file by file": ["here/", "--force"],
    "--workers 2": ["processes/", "--force", "--workers", "2"],
    "--engine ray": ["ray/", "--force", *RAY],
}


def write_inputs(rows: int) -> None:
    draw = np.random.default_rng(0)

    def logits(n: int) -> tuple[np.ndarray, np.ndarray]:
        labels = draw.integers(0, CLASSES, n)
        return (draw.normal(size=(n, CLASSES)) + 4 * np.eye(CLASSES)[labels]).astype(np.float32), labels

    igeood.black_box().fit(*logits(5000)).calibrate(logits(2000)[0]).save("guard.safetensors")
    for i in range(FILES):
        igeood.write_logits(f"in/{i:02}.parquet", *logits(rows // FILES))


def measure(words: list[str], rows: int) -> str:
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([*SCORE, *words], check=True, capture_output=True, timeout=PATIENCE)  # noqa: S603
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return f"{seconds:6.1f} s, {rows / seconds:9,.0f} rows/s, {cpu:6.1f} CPU s of its own processes"


def workers_of(driver: int) -> list[int]:
    """Ray's workers of a driver that have a file in hand."""
    parents, working = {}, []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may have ended
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            working += [int(folder.name)] * (folder / "cmdline").read_bytes().startswith(b"ray::attempt")
    return [pid for pid in working if driver in (parents.get(pid), parents.get(parents.get(pid, 0)))]


def score_while_killing(kills: int, draw: random.Random) -> int:
    """Score on Ray; kill workers at random moments, and the driver once; return how many workers were killed."""
    killed, end = 0, time.monotonic() + PATIENCE
    for is_last in (False, True):
        with subprocess.Popen([*SCORE, "killed/", *RAY], stdout=subprocess.DEVNULL) as driver:  # noqa: S603
            while driver.poll() is None and time.monotonic() < end:
                time.sleep(draw.uniform(0.1, 1.0))
                if not is_last and len(list(Path("killed").glob("*.parquet"))) >= FILES // 3:
                    driver.kill()
                elif killed < kills and (working := workers_of(driver.pid)):
                    os.kill(draw.choice(working), signal.SIGKILL)
                    killed += 1
        assert (driver.returncode == 0) or not is_last
        there = len(list(Path("killed").glob("*.parquet")))
        print(f"driver ended with {driver.returncode}: {there} files, {killed} kills", flush=True)
    return killed


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("rows", 5_000_000), ("kills", 20), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_inputs(given.rows)
        for _ in range(given.rounds):  # in turn, so that a noisy neighbour hits all
            for name, words in WAYS.items():
                print(f"{name:14}{measure(words, given.rows)}", flush=True)
        killed = score_while_killing(given.kills, random.Random(0))  # noqa: S311
        whole = {path.name: path.read_bytes() for path in Path("here").iterdir()}
        for other in ("processes", "ray", "killed"):
            assert {p.name: p.read_bytes() for p in Path(other).iterdir() if p.name[0] != "."} == whole, other
        assert sum(pq.read_metadata(path).num_rows for path in Path("killed").glob("*.parquet")) == given.rows
        print(f"{FILES} files, {given.rows:,} rows: the same bytes from every way, and after {killed} kills")
        os.chdir("/")


if __name__ == "__main__":
    main()
