"""A folder of logits files, scored on Ray: a unit of work is one file, and the same command goes on after a stop."""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

import igeood

FILES, ROWS = 4, 500


def logits(n: int, seed: int, margin: float = 6.0) -> tuple[np.ndarray, np.ndarray]:
    """Logits of inputs that a classifier of four classes knows; with a margin of 0, of inputs that it does not know."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 4, n)
    return draw.normal(size=(n, 4)) + margin * np.eye(4)[labels], labels


def main(folder: Path) -> None:
    """Write files, score them on a Ray cluster of this machine, read the verdicts."""
    guard = igeood.black_box().fit(*logits(2000, seed=0)).calibrate(logits(1000, seed=1)[0])
    guard.save(folder / "guard.safetensors")
    for number in range(FILES):  # the last one has inputs that the classifier does not know
        rows, _ = logits(ROWS, seed=10 + number, margin=0.0 if number == FILES - 1 else 6.0)
        (folder / "logits").mkdir(exist_ok=True)
        igeood.write_logits(folder / "logits" / f"part-{number}.parquet", rows)
    # igeood score guard.safetensors logits/ --out scores/ --engine ray; --address HOST:PORT names a larger cluster
    words = ["score", "guard.safetensors", "logits/", "--out", "scores/", "--engine", "ray"]
    command = [sys.executable, "-m", "igeood.cli", *words]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)  # noqa: S603 (our own command)
    for path in sorted((folder / "scores").glob("*.parquet")):
        flags = pq.read_table(path)["is_ood"].to_numpy()
        print(f"{path.name}: {len(flags)} rows, {100 * flags.mean():5.1f}% refused")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
