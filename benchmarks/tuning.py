"""`tune` beside `fit`, in CPU time: all temperatures of the sweep at 1,000 classes, and a white box at ten.

The training rows of the black box are 50,000 of 1,000 logits, the white box has 10,000 rows with three layers; both are
tuned on 1,000 validation samples of each kind.

python benchmarks/tuning.py
"""

from collections.abc import Iterator

import torch

import igeood
from igeood import Outputs
from side_by_side import Row, cpu_seconds, main


def outputs(n: int, classes: int, widths: tuple[int, ...], *, scale: float = 1.0, seed: int = 0) -> Outputs:
    """Made-up outputs: confident logits, and features about a mean for each class; `scale` shrinks both."""
    means = [torch.randn(classes, width, generator=torch.Generator().manual_seed(i)) for i, width in enumerate(widths)]
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    logits = torch.randn(n, classes, generator=draw)
    logits[torch.arange(n), labels] += 8.0 * scale
    noise = [torch.randn(n, width, generator=draw) for width in widths]
    features = {f"layer{i}": scale * means[i][labels] + noise[i] for i in range(len(widths))}
    return Outputs(logits, features, labels)


def cases() -> Iterator[Row]:
    torch.set_num_threads(1)
    sizes = {
        "black box, 50,000 × 1,000 classes": (50_000, 1000, (), 4.0),
        "white box": (10_000, 10, (64, 128, 256), None),
    }
    for case, (n, classes, widths, most) in sizes.items():
        train = outputs(n, classes, widths)
        inside, outside = (outputs(1000, classes, widths, scale=s, seed=7 + i) for i, s in enumerate((0.8, 0.4)))
        guard = igeood.white_box(method="igeood") if widths else igeood.black_box()
        fit = cpu_seconds(lambda guard=guard, train=train: guard.fit(train))
        tune = cpu_seconds(lambda guard=guard, a=inside, b=outside: guard.tune(a, b, share=1.0))
        rates = f"{100 * guard.tuning.before:.1f}% of OOD refused before, {100 * guard.tuning.after:.1f}% after"
        yield Row(case, 1, "fit", tune, fit, tune / fit, most=most, note=rates)


if __name__ == "__main__":
    main("Tuning", cases)
