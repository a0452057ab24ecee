"""A whole `guard.predict` beside the bare network, in CPU time.

ResNet-18 takes images of 32 x 32, with random weights; the small network takes about 0.3 ms for an image, and there the
note has what counts: the milliseconds that the guard adds. Both boxes have the default method. One row of 1,000 logits
is judged beside the bare float64 product with the centroids. Fitting is measured beside the forward passes of the same
images.

python benchmarks/predict.py
"""

import statistics
from collections.abc import Callable, Iterator

import torch
from torch import nn

import igeood
from side_by_side import ROUNDS, Row, cpu_seconds, main

LIMITS = {("black", 1): 1.05, ("white", 1): 1.1, ("black", 32): 1.03, ("white", 32): 1.03}
ADDED = {"black": 0.5, "white": 1.0}  # milliseconds, on the small network
CLASSES = 10
MANY = 1000


class Residual(nn.Module):
    """A basic block of ResNet-18."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        stride = 1 if channels == out else 2
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.short = nn.Identity() if stride == 1 else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        return self.relu(inner + self.short(x))


def resnet_18(classes: int = CLASSES) -> nn.Module:
    """ResNet-18 for images of 32 x 32: stages of 64, 128, 256 and 512 channels."""

    def stage(channels: int, out: int) -> nn.Module:
        return nn.Sequential(Residual(channels, out), Residual(out, out))

    first = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    stages = [stage(64, 64), stage(64, 128), stage(128, 256), stage(256, 512)]
    return nn.Sequential(*first, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)).eval()


def small() -> nn.Module:
    """About 0.3 ms for one image on one core."""
    widths = [(3, 16), (16, 32), (32, 64)]
    stages = [nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in widths]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES)).eval()


def guards(model: nn.Module, classes: int = CLASSES, n: int = 1200) -> dict[str, igeood.Guard]:
    """A black and a white box, fitted and calibrated on noise."""
    x, held_out = torch.rand(n, 3, 32, 32), torch.rand(100, 3, 32, 32)
    labels = torch.arange(n) % classes
    made = {"black": igeood.black_box(model), "white": igeood.white_box(model)}
    return {name: guard.fit((x, labels)).calibrate(held_out) for name, guard in made.items()}


def one_row_of_logits() -> tuple[Callable[[], object], Callable[[], object]]:
    """`predict` of a row of 1,000 logits, and the bare product."""
    labels = torch.arange(2000) % 1000
    logits = torch.randn(2000, 1000)
    logits[torch.arange(2000), labels] += 12.0
    guard = igeood.black_box().fit(logits, labels).calibrate(logits[:100] + 0.1 * torch.randn(100, 1000))
    row, centroids = logits[:1], torch.rand(1000, 1000, dtype=torch.float64)
    return lambda: guard.predict(row), lambda: row.double() @ centroids.T


def plain(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    def job() -> torch.Tensor:
        with torch.no_grad():
            return model(x)

    return job


def measured(jobs: dict[str, Callable[[], object]], calls: int) -> dict[str, list[float]]:
    """CPU seconds of each job in each round; short turns, so that all see the same machine."""
    for job in jobs.values():
        cpu_seconds(job, 3)
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(6 * ROUNDS):
        for name, job in jobs.items():
            taken[name].append(cpu_seconds(job, calls))
    return taken


def row(case: str, taken: dict[str, list[float]], name: str, bare: str, most: float, *, added: float = 0.0) -> Row:
    pairs = list(zip(taken[name], taken[bare], strict=True))
    ratio, more = (statistics.median(f(a, b) for a, b in pairs) for f in (lambda a, b: a / b, lambda a, b: a - b))
    ours, theirs = (statistics.median(taken[key]) for key in (name, bare))
    note = f"adds {1e3 * more:.2f} ms"
    if added:
        note += f", at most {added:g}"
        most = round((theirs + added / 1e3) / theirs, 2)
    return Row(case, torch.get_num_threads(), bare, ours, theirs, ratio, most=most, note=note)


def fitting(n: int = 1200) -> Row:
    """`fit` of a white box beside the forward passes of its images."""
    model, x, labels = resnet_18(), torch.rand(n, 3, 32, 32), torch.arange(n) % CLASSES
    batches = [(x[i : i + 100], labels[i : i + 100]) for i in range(0, n, 100)]

    def passes() -> None:
        with torch.no_grad():
            for images, _ in batches:
                model(images)

    jobs = {"the forward passes": passes, "fit": lambda: igeood.white_box(model).fit(batches)}
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(3):
        for name, job in jobs.items():
            taken[name].append(cpu_seconds(job, 1))
    return row(f"fit, ResNet-18, {n} images", taken, "fit", "the forward passes", 1.15)


def cases() -> Iterator[Row]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for title, make, batches, calls in (("ResNet-18", resnet_18, (1, 32), 2), ("small network", small, (1,), 20)):
        model = make()
        both = guards(model)
        for n in batches:
            x = torch.rand(n, 3, 32, 32)
            jobs = {"the bare network": plain(model, x)}
            jobs |= {name: lambda guard=guard, x=x: guard.predict(x) for name, guard in both.items()}
            taken = measured(jobs, calls)
            for name in both:
                limit = {"added": ADDED[name], "most": 0.0} if make is small else {"most": LIMITS[name, n]}
                yield row(f"{name} box, {title}, batch {n}", taken, name, "the bare network", **limit)
    model, x = resnet_18(MANY), torch.rand(32, 3, 32, 32)
    guard = guards(model, MANY, 3 * MANY)["white"]
    jobs = {"the bare network": plain(model, x), "white": lambda: guard.predict(x)}
    yield row("white box, ResNet-18, 1,000 classes, batch 32", measured(jobs, 2), "white", "the bare network", 1.05)
    yield fitting()
    ours, product = one_row_of_logits()
    taken = measured({"ours": ours, "the bare product": product}, 20)
    yield row("one row of 1,000 logits", taken, "ours", "the bare product", 4.0)


if __name__ == "__main__":
    main("Predict", cases)
