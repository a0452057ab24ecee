"""What each access refuses of inputs that went wrong on their way to the model, and of other data.

Guards are not tuned: the defaults of `black_box`, `grey_box` and `white_box`, and Mahalanobis beside them. They are
fitted on training images and calibrated at TPR 95% on one half of the test images. The other half goes wrong in the
ways below. Networks are files of weights that say what they are, such as `igeood demo` and `igeood train` write.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

import igeood
from igeood.bench.datasets import load
from igeood.bench.runs import Network, load_network
from igeood.images import normalised

FAULTS: dict[str, Callable[[Tensor], Tensor]] = {  # of pixels (N, 3, side, side) from 0 to 255
    "nothing": lambda x: x,
    "pixels not divided by 255": lambda x: 255 * x,
    "inverted": lambda x: 255 - x,
    "red and blue swapped": lambda x: x.flip(1),
    "upside down": lambda x: x.flip(2),
    "mosaic of 4 × 4 pixels": lambda x: functional.interpolate(functional.avg_pool2d(x, 4), scale_factor=4),
    "rows shuffled": lambda x: x[:, :, torch.randperm(x.shape[2], generator=torch.Generator().manual_seed(0))],
    "black": torch.zeros_like,
    "noise": lambda x: 255 * torch.rand(x.shape, generator=torch.Generator().manual_seed(0)),
}


def measure(network: Network, others: list[str], n_train: int, n: int) -> None:
    """Print a table."""

    def pixels(name: str, split: str, limit: int) -> Tensor:
        return torch.from_numpy(load(name, split=split, limit=limit, side=network.size).images()).float()

    def inputs(x: Tensor) -> list[Tensor]:
        return [normalised(part, network.mean, network.std) for part in x.split(50)]

    test = pixels(network.in_distribution, "test", 2 * n)
    hold, rest = inputs(test[::2]), test[1::2]
    cases = {name: inputs(fault(rest)) for name, fault in FAULTS.items()}
    cases["inputs multiplied by 16"] = [16 * x for x in inputs(rest)]
    cases |= {f"images of {name}": inputs(pixels(name, "test", n)) for name in others}
    train = list(network.batches(load(network.in_distribution, split="train", limit=n_train, side=network.size), 50))
    guards = {
        "black box": igeood.black_box(network.model),
        "grey box": igeood.grey_box(network.model, std=network.std),
        "white box": igeood.white_box(network.model),
        "white box, `mahalanobis`": igeood.white_box(network.model, method="mahalanobis"),
    }
    print(f"\n{network.name}, {network.in_distribution}: {n_train} training images, {len(rest)} of each kind\n")
    print("| wrong with the input |", " | ".join(guards), "|\n|---|---:|---:|---:|---:|")
    for guard in guards.values():
        guard.fit(train).calibrate(hold)
    for name, batches in cases.items():
        refused = [float(guard.predict(batches).is_ood.double().mean()) for guard in guards.values()]
        print(f"| {name} |", " | ".join(f"{100 * share:.0f}%" for share in refused), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="+")
    parser.add_argument("--ood", action="append", default=[], help="other data sets")
    parser.add_argument("--train", type=int, default=2000, help="training images")
    parser.add_argument("--images", type=int, default=300, help="of each kind, and to calibrate on")
    given = parser.parse_args()
    for name in given.networks:
        measure(load_network(name), given.ood, given.train, given.images)


if __name__ == "__main__":
    main()
