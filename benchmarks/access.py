"""What each access refuses of inputs that went wrong on their way to the model, and of other data.

Guards are the defaults, not tuned: `black_box`, `grey_box` and `white_box`, fitted on training images and calibrated at
TPR 95% on test images. The others go wrong in the ways below. Networks are files of weights that say what they are,
such as `igeood demo` and `igeood train` write.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import igeood
from igeood.bench.datasets import load
from igeood.bench.networks import normalised
from igeood.bench.runs import load_network

FAULTS: dict[str, Callable[[Tensor], Tensor]] = {  # of images (N, 3, side, side) in [0, 1], or of the model's inputs
    "as they should be": lambda x: x,
    "inputs × 16": lambda x: 16 * x,
    "pixels from 0 to 255": lambda x: 255 * x,
    "inverted": lambda x: 1 - x,
    "red and blue swapped": lambda x: x.flip(1),
    "upside down": lambda x: x.flip(2),
    "blurred, 4 × 4 pixels": lambda x: torch.nn.functional.interpolate(
        torch.nn.functional.avg_pool2d(x, 4), scale_factor=4
    ),
    "rows shuffled": lambda x: x[:, :, torch.randperm(x.shape[2], generator=torch.Generator().manual_seed(0))],
    "blank": torch.zeros_like,
    "noise": lambda x: torch.rand(x.shape, generator=torch.Generator().manual_seed(0)),
}
AFTER = ("inputs × 16",)  # happens to what is normalised already


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("networks", nargs="+", type=Path)
    parser.add_argument("--ood", action="append", default=[])
    parser.add_argument("--train", type=int, default=2000)
    parser.add_argument("--images", type=int, default=300, help="of each kind, and to calibrate on")
    given = parser.parse_args()
    for path in given.networks:
        network = load_network(str(path))
        scale = (network.mean, network.std)

        def pixels(name: str, split: str, limit: int) -> Tensor:
            chosen = load(name, split=split, limit=limit, side=network.size)  # noqa: B023
            return torch.cat(list(chosen.batches(100)))

        learn = load(network.in_distribution, split="train", limit=given.train, side=network.size)
        x, y = torch.cat(list(learn.batches(100))), torch.as_tensor(learn.labels)
        test = pixels(network.in_distribution, "test", 2 * given.images)
        hold, rest = test[::2], test[1::2]
        guards = {
            "black box": igeood.black_box(network.model),
            "grey box": igeood.grey_box(network.model, std=network.std),
        }
        guards["white box"] = igeood.white_box(network.model)
        batches = [(normalised(a, *scale), b) for a, b in zip(x.split(100), y.split(100), strict=True)]
        cases = {
            name: fault(normalised(rest, *scale)) if name in AFTER else normalised(fault(rest), *scale)
            for name, fault in FAULTS.items()
        }
        cases |= {name: normalised(pixels(name, "test", given.images), *scale) for name in given.ood}
        print(f"\n{network.name}, {network.in_distribution}: refused of {len(rest)}, in percent\n")
        print("| inputs |", " | ".join(guards), "|\n|---|" + "---:|" * len(guards))
        for guard in guards.values():
            guard.fit(batches).calibrate(list(normalised(hold, *scale).split(100)))
        for name, inputs in cases.items():
            shares = [
                100 * float(guard.predict(list(inputs.split(100))).is_ood.double().mean()) for guard in guards.values()
            ]
            print(f"| {name} |", " | ".join(f"{share:.0f}" for share in shares), "|", flush=True)


if __name__ == "__main__":
    main()
