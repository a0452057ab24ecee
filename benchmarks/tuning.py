"""500 temperatures tried on validation samples, beside a plain loop that fits and scores at each of them.

The loop is timed on every 20th temperature, and its time is multiplied.

python benchmarks/tuning.py
"""

from collections.abc import Iterator

import numpy as np
import torch

from igeood import IgeoodLogits, Outputs
from igeood.metrics import evaluate
from samples import confident_logits, densenet
from side_by_side import Row, compare, main, threads

N = 20_000
TEMPERATURES = [float(t) for t in np.geomspace(1.0, 1000.0, 500)]
PART = 20


def outputs() -> tuple[str, Outputs, Outputs, Outputs]:
    """Training samples, and validation samples in and out of the distribution: N of the one, N of the others."""
    train, test = densenet("train"), densenet("test")
    if train is None or test is None:
        logits, labels = confident_logits(2 * N, 10, margin=5.0)
        return (
            "made up",
            Outputs(logits[:N], labels=labels[:N]),
            Outputs(logits[N::2]),
            Outputs(logits[N + 1 :: 2] * 0.3),
        )
    both = Outputs.concat([train, test])
    known = Outputs(both.logits, labels=both.labels)
    return "DenseNet", known, Outputs(test.logits), Outputs(test.logits * 0.3 + torch.randn(len(test), 10))


def ours(train: Outputs, inside: Outputs, outside: Outputs) -> list[float]:
    at = IgeoodLogits().fit(train).over_temperatures(train)
    tried = (at(temperature) for temperature in TEMPERATURES)
    return [evaluate(each.score(inside), each.score(outside)).tnr_at_tpr for each in tried]


def loop(train: Outputs, inside: Outputs, outside: Outputs) -> list[float]:
    tried = (IgeoodLogits(temperature=t).fit(train) for t in TEMPERATURES[::PART])
    return [evaluate(each.score(inside), each.score(outside)).tnr_at_tpr for each in tried]


def cases() -> Iterator[Row]:
    torch.manual_seed(0)
    kind, *data = outputs()
    apart = max(abs(a - b) for a, b in zip(ours(*data)[::PART], loop(*data), strict=True))
    for _ in threads():
        yield from compare(
            f"500 temperatures, N = {N:,}, {kind}",
            lambda: ours(*data),
            {"a fit for each": (lambda: loop(*data), "least", 8.0)},
            scale={"a fit for each": float(PART)},
            note=f"rates at most {apart:.5f} apart",
        )


if __name__ == "__main__":
    main("Tuning the temperature", cases)
