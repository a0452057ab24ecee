"""How many foreign inputs are still refused when somebody walks them down the score, and how many good ones are kept.

The attacker knows model and guard, and may change each pixel by at most a size given in pixel units (L∞). Projected
gradient descent (PGD): steps of a quarter of the size along the sign of the score's gradient, back into the box around
the image and into [0, 1] after each, until the verdict turns or the steps are used up. What turns within a small box
turns within a larger one, so larger sizes are only tried on the inputs that are left. Pixels are not rounded to 8 bits.

    IGEOOD_DATA=... python benchmarks/robustness/adversary.py

needs CIFAR-10, Tiny-ImageNet and the weights in $IGEOOD_DATA, and prints the table of docs/guarantees.md. What the
network makes of training and calibration images is read from build/ if `make reproduction` has put it there.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import igeood
from igeood.bench import datasets
from igeood.bench.runs import Network, load_network
from igeood.bench.runs.observing import Observer
from igeood.detectors import METHODS as KNOWN
from igeood.model.batch import as_batch
from igeood.model.reader import Reader

Score = Callable[[Tensor], Tensor]
Range = Tensor | float

SIZES = (1 / 255, 2 / 255, 8 / 255)
METHODS = {"msp": "MSP", "energy": "Energy", "igeood-logits": "IGEOOD, black box", "igeood": "IGEOOD, white box"}
BATCH = 25  # images: on a CPU larger batches leave the cache


def smallest_size(
    score: Score,
    x: Tensor,
    threshold: float,
    sizes: Sequence[float] = SIZES,
    *,
    steps: int = 20,
    raising: bool = False,
    std: Range = 1.0,
    low: Range = 0.0,
    high: Range = 1.0,
) -> Tensor:
    """The smallest of the sizes that turns each input's verdict, (N,): 0 if it is so already, inf if none does.

    Parameters
    ----------
    score : callable
        Inputs (N, ...) to scores (N,), differentiable.
    x : Tensor
        (N, ...) inputs.
    threshold : float
        Of the guard: `is_ood = score > threshold`.
    sizes : sequence of float
        In pixel units, ascending.
    steps : int
        For each size, of a quarter of it.
    raising : bool
        Push kept inputs over the threshold, in place of refused ones under it.
    std, low, high : Tensor or float
        Of the inputs' normalisation, and their range, broadcast to `x`.
    """
    needed = torch.full((len(x),), math.inf)
    for size in (0.0, *sizes):
        left = needed.isinf().nonzero()[:, 0]
        for rows in left.split(BATCH):
            box = (x[rows] - size / std, x[rows] + size / std)
            box = (torch.maximum(box[0], torch.as_tensor(low)), torch.minimum(box[1], torch.as_tensor(high)))
            turned = _walk(score, x[rows], threshold, box, size / 4 / std, steps if size else 0, raising)
            needed[rows[turned]] = size
    return needed


def _walk(
    score: Score, x: Tensor, threshold: float, box: tuple[Tensor, Tensor], step: Range, steps: int, raising: bool
) -> Tensor:
    """Which inputs' verdicts turn within the box: (N,) bool."""
    turned = torch.zeros(len(x), dtype=torch.bool)
    x = x.clone()
    for taken in range(steps + 1):
        rows = (~turned).nonzero()[:, 0]
        if len(rows) == 0:
            break
        leaf = x[rows].requires_grad_(taken < steps)
        values = score(leaf)
        turned[rows] = (values.detach() > threshold) == raising
        if taken < steps:
            (gradient,) = torch.autograd.grad(values.sum(), leaf)
            moved = leaf.detach() + (1 if raising else -1) * step * gradient.sign()
            x[rows] = torch.minimum(torch.maximum(moved, box[0][rows]), box[1][rows])
    return turned


def measure(network: Network, method: str, observer: Observer, count: int, steps: int) -> str:
    """One line of the table: the shares refused of foreign images and kept of good ones, before and after."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (network.mean, network.std))
    needs = KNOWN[method].needs
    train = observer.outputs(datasets.load(network.in_distribution, split="train"), needs, "train")
    test = datasets.load(network.in_distribution)
    rest = observer.outputs(test, needs)[: len(test) - count]  # those that are attacked set no threshold
    guard = (igeood.white_box if KNOWN[method].needs_layers else igeood.black_box)(method=method)
    guard.fit(train).calibrate(rest)
    reader, cells = Reader(network.model, guard.layers), [METHODS[method]]
    for images, raising in ((datasets.load("tiny-imagenet", limit=count), False), (test[-count:], True)):
        x = torch.cat([batch[0] for batch in network.batches(images, BATCH)])
        needed = smallest_size(
            lambda z: guard.detector.score(reader(as_batch(z))), x, guard.threshold, raising=raising, steps=steps,
            std=std, low=(0 - mean) / std, high=(1 - mean) / std,
        )  # fmt: skip
        cells += [f"{100 * float((needed > size).double().mean()):.1f}" for size in (0.0, *SIZES)]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", default=None, help="a network of `igeood train`; the reproduction's DenseNet")
    parser.add_argument("--method", choices=METHODS, action="append", help="all of them by default")
    parser.add_argument("--count", type=int, default=200, help="images of each set to attack")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--outputs", type=Path, default=Path("build/reproduction/outputs"))
    given = parser.parse_args()
    weights = given.weights or datasets.data_root() / "weights" / "densenet-bc-100-cifar10.safetensors"
    network = load_network(str(weights))
    network.model.requires_grad_(False)
    observer = Observer(network, given.outputs)
    sizes = " | ".join(f"{255 * size:.0f}/255" for size in SIZES)
    print(f"{network.name}, {network.in_distribution}; {given.count} images of each set, {given.steps} steps\n")
    print(f"| score | refused | {sizes} | kept | {sizes} |")
    print("|---|" + 2 * (len(SIZES) + 1) * "---:|")
    for method in given.method or METHODS:
        print(measure(network, method, observer, given.count, given.steps), flush=True)
    print(f"\nin %; one standard error is at most {100 * math.sqrt(0.25 / given.count):.1f}")


if __name__ == "__main__":
    main()
