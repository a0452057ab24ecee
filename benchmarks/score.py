"""`fit` and `score` of the default and of the usual methods beside the bare read of the same Parquet file.

The file has logits, labels and, for white boxes, two layers; `fit` and `score` read it block by block, as the command
line does. There is no limit: the rows show which method costs what.

python benchmarks/score.py
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import torch

import igeood
from side_by_side import Row, compare, main
from tuning import outputs

SIZES = ((20_000, 10, (64, 128)), (2_000, 1000, (256, 512)))
GUARDS = {
    igeood.black_box: ("evidence", "igeood-logits", "gen", "energy", "msp"),
    igeood.white_box: ("evidence", "mahalanobis", "relative-mahalanobis++", "knn"),
}


def read(path: Path, columns: list[str]) -> int:
    """Read all batches of a file, and keep none."""
    return sum(batch.num_rows for batch in pq.ParquetFile(path).iter_batches(columns=columns, use_threads=False))


def cases() -> Iterator[Row]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for n, classes, widths in SIZES:
            path = Path(folder) / f"{classes}.parquet"
            igeood.write_logits(path, outputs(n, classes, widths))
            for make, name in ((make, name) for make, names in GUARDS.items() for name in names):
                layers = ["layer0", "layer1"] if make is igeood.white_box else []
                columns = ["logits", "label", *(f"feature.{layer}" for layer in layers)]
                file = igeood.read_logits(path, layers=layers)
                guard = make(method=name).fit(file)
                for what, job in (("fit", guard.fit), ("score", guard.score)):
                    bare = {"bare read": (lambda path=path, columns=columns: read(path, columns), "most", None)}
                    box = make.__name__.replace("_", " ")
                    case = f"{what}, {name}, {box}, {n:,} × {classes:,}"
                    yield from compare(case, lambda job=job, file=file: job(file), bare, memory=False, number=3)


if __name__ == "__main__":
    main("Fit and score of files", cases)
