"""`fit` and `score` of every registered method beside the bare read of the same Parquet file.

The file has logits, labels and, for methods that read layers, two layers; `fit` and `score` read it block by block, as
the command line does. There is no limit: the rows show which method costs what.

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

SIZES = ((20_000, 10, (64, 128)), (8_000, 100, (128, 256)), (2_000, 1000, (256, 512)))


def read(path: Path, columns: list[str]) -> int:
    """Read all batches of a file, and keep none."""
    return sum(batch.num_rows for batch in pq.ParquetFile(path).iter_batches(columns=columns, use_threads=False))


def cases() -> Iterator[Row]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for n, classes, widths in SIZES:
            path = Path(folder) / f"{classes}.parquet"
            igeood.write_logits(path, outputs(n, classes, widths))
            pooled = {name: method for name, method in igeood.METHODS.items() if method.needs.pool is None}
            for name, method in pooled.items():
                layers = ["layer0", "layer1"] if method.needs_layers else []
                columns = ["logits", "label", *(f"feature.{layer}" for layer in layers)]
                file = igeood.read_logits(path, layers=layers)
                guard = (igeood.white_box if layers else igeood.black_box)(method=name).fit(file)
                for what, job in (("fit", guard.fit), ("score", guard.score)):
                    bare = {"bare read": (lambda path=path, columns=columns: read(path, columns), "most", None)}
                    case = f"{what}, {name}, {n:,} × {classes:,}"
                    yield from compare(case, lambda job=job, file=file: job(file), bare, memory=False, number=3)


if __name__ == "__main__":
    main("Fit and score of files", cases)
