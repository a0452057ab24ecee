"""Every untuned method on several networks: docs/comparison.md, by `make comparison`.

The networks are those of `make networks` and, where $IGEOOD_DATA has it, the DenseNet trained by others. Each is
compared by `igeood.compare`; its figures are kept as JSON in --out, so a run that was stopped goes on.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import nn

import igeood
from igeood.bench.datasets import data_root, load
from igeood.bench.networks import Task
from igeood.bench.runs import load_network
from igeood.bench.runs.averages import title
from igeood.images import normalised
from train_networks import FASHION, JOBS, beside, cifar, digits, fashion, in_channels, mnist, network

LIMIT = 2000  # images of each OOD set at most
BATCH = 100
OURS = "fisher-rao-product"
Images = np.ndarray


def grey(images: Images) -> Images:
    """Colour images as grey ones in three channels."""
    return in_channels(images.mean(axis=1).round().astype(np.uint8))


def some(images: Images) -> Images:
    """At most LIMIT images, evenly spaced."""
    return images[np.linspace(0, len(images) - 1, min(LIMIT, len(images))).round().astype(int)]


def named(name: str, side: int = 32) -> Images:
    return load(name, limit=LIMIT, side=side).images()


def colour_sets(packages: Path) -> dict[str, Images]:
    sets = {title(name): named(name) for name in ("tiny-imagenet", "tiny-imagenet-nearest", "chars74k", "gaussian")}
    return {**sets, "Fashion-MNIST": named(FASHION), "MNIST": some(mnist(packages).test_images)}


def grey_sets(packages: Path, known: str) -> dict[str, Images]:
    sets = {name: grey(images) for name, images in colour_sets(packages).items() if "nearest" not in name}
    return {"CIFAR-10": grey(some(cifar(packages).test_images)), **{n: i for n, i in sets.items() if n != known}}


def digit_sets(packages: Path, n: int) -> dict[str, Images]:
    """Foreign images in place of all n digits, or of the first; and the digits upside down and as negatives."""
    images, _ = digits(packages, "t10k")
    known = [some(images[np.random.default_rng([n, 9, place]).permutation(len(images))]) for place in range(n)]

    def row(pieces: Images, count: int) -> Images:
        pieces = pieces.mean(axis=1).round().astype(np.uint8) if pieces.ndim == 4 else pieces
        orders = [np.random.default_rng([n, 7, place]).permutation(len(pieces)) for place in range(count)]
        size = min(len(pieces), LIMIT)
        return beside([*(pieces[order][:size] for order in orders), *(k[:size] for k in known[count:])])

    letters, things = named("chars74k", 28), named(FASHION, 28)
    return {
        "Fashion-MNIST": row(things, n), "Chars74K": row(letters, n),
        "Tiny-ImageNet": row(named("tiny-imagenet", 28), n), "Gaussian noise": row(named("gaussian", 28), n),
        "one Fashion-MNIST": row(things, 1), "one Chars74K": row(letters, 1),
        "upside down": beside([k[:, ::-1] for k in known]), "negatives": beside([255 - k for k in known]),
    }  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A network with its data."""

    model: nn.Module
    task: Task
    sets: dict[str, Images]

    def batches(self, images: Images, labels: np.ndarray | None = None) -> Iterator[object]:
        for start in range(0, len(images), BATCH):
            x = normalised(images[start : start + BATCH], self.task.mean, self.task.std).contiguous()
            yield x if labels is None else (x, torch.from_numpy(labels[start : start + BATCH]))


def densenet(_: Path, packages: Path) -> Subject:
    found = load_network(str(data_root() / "weights" / "densenet-bc-100-cifar10.safetensors"))
    learn, judge = (load("cifar-10", split=split) for split in ("train", "test"))
    parts = (learn.images(), learn.labels, judge.images(), judge.labels)
    return Subject(found.model, Task("CIFAR-10", 10, *parts, found.mean, found.std), colour_sets(packages))


def trained(name: str, networks: Path, packages: Path) -> Subject:
    job = next(job for job in JOBS if job.name == name)
    task = job.data(packages)
    if job.classes >= 100:
        return Subject(network(name, networks), task, digit_sets(packages, {100: 2, 1000: 3}[job.classes]))
    kind = name.split("-")[1]
    whole = {"cifar": cifar, "fashion": fashion, "mnist": mnist}[kind](packages)
    known = {"cifar": "CIFAR-10", "fashion": "Fashion-MNIST", "mnist": "MNIST"}[kind]
    sets = colour_sets(packages) if kind == "cifar" else grey_sets(packages, known)
    left_out = some(whole.test_images[whole.test_labels >= 8])
    return Subject(network(name, networks), task, {f"{known}, classes 8 and 9": left_out, **sets})


SUBJECTS: dict[str, Callable[[Path, Path], Subject]] = {
    "DenseNet-BC-100, CIFAR-10": densenet,
    **{
        label: partial(trained, name)
        for label, name in {
            "ResNet-10, 8 classes of CIFAR-10": "resnet-cifar-8",
            "CNN, 8 classes of CIFAR-10": "cnn-cifar-8",
            "CNN, 8 classes of Fashion-MNIST": "cnn-fashion-8",
            "ViT, 8 classes of Fashion-MNIST": "vit-fashion-8",
            "MLP, 8 classes of MNIST": "mlp-mnist-8",
            "CNN, 100 classes (two digits)": "cnn-mnist-pairs",
            "CNN, 1,000 classes (three digits)": "cnn-mnist-triples",
        }.items()
    },
}


def measure(make: Callable[[Path, Path], Subject], networks: Path, packages: Path) -> dict[str, object]:
    subject = make(networks, packages)
    task, model = subject.task, subject.model
    found = igeood.compare(
        model, subject.batches(task.images, task.labels), subject.batches(task.test_images),
        {name: subject.batches(images) for name, images in subject.sets.items()},
    )  # fmt: skip
    with torch.no_grad():
        labels = torch.cat([model(x).argmax(dim=1) for x in subject.batches(task.test_images)]).numpy()
    accuracy = float((labels == task.test_labels).mean())
    counts = {"classes": task.classes, "train": len(task.images), "held_out": len(task.test_images)}
    return {**found.to_dict(), **counts, "accuracy": accuracy, "sets": {n: len(i) for n, i in subject.sets.items()}}


# The page

Results = dict[str, dict[str, object]]


def rows_of(result: dict[str, object]) -> dict[str, dict[str, float]]:
    return {row["method"]: row for row in result["methods"]}


def mean(results: list[dict[str, object]], method: str, metric: str) -> float:
    """Over all pairs of network and OOD set."""
    return 100 * fmean(rows_of(r)[method][f"{metric} {ood}"] for r in results for ood in r["sets"])


def pairs(results: Results, method: str) -> dict[tuple[str, str], float]:
    return {(n, ood): 100 * rows_of(r)[method][f"tnr {ood}"] for n, r in results.items() for ood in r["sets"]}


def ranks(results: Results, methods: list[str]) -> dict[str, float]:
    """The mean rank of each method by TNR over all pairs; equals share the mean of their ranks."""
    tables = np.array([list(pairs(results, method).values()) for method in methods])
    below = (tables[:, None] < tables[None]).sum(axis=1) + ((tables[:, None] == tables[None]).sum(axis=1) - 1) / 2
    return dict(zip(methods, (1 + below.mean(axis=1)).tolist(), strict=True))


def table(header: list[str], lines: list[list[str]]) -> str:
    rule = "|---|" + "---:|" * (len(header) - 1)
    return "\n".join(["| " + " | ".join(header) + " |", rule, *("| " + " | ".join(line) + " |" for line in lines), ""])


def page(results: Results) -> str:
    groups = {
        "8 to 10 classes": [r for r in results.values() if r["classes"] <= 10],
        "100 classes": [r for r in results.values() if r["classes"] == 100],
        "1,000 classes": [r for r in results.values() if r["classes"] == 1000],
    }
    groups = {name: group for name, group in groups.items() if group}
    methods = list(rows_of(next(iter(results.values()))))
    methods.sort(key=lambda m: -mean(next(iter(groups.values())), m, "tnr"))
    rank, ours = ranks(results, methods), pairs(results, OURS)
    lines = []
    for method in methods:
        cells = [f"{mean(g, method, 'tnr'):.1f} / {mean(g, method, 'auroc'):.1f}" for g in groups.values()]
        worst = min(pairs(results, method).values())
        lead = sum(ours[pair] > value for pair, value in pairs(results, method).items())
        lines.append([f"`{method}`", *cells, f"{rank[method]:.1f}", f"{worst:.1f}", f"{lead} of {len(ours)}"])
    header = ["method", *groups, "mean rank", "worst pair", "product ahead on"]
    parts = [table(header, lines), "## Where the product loses", "", losses(results, methods, ours)]
    parts += ["## What scoring costs", "", costs(results, methods), "## Each network", ""]
    for name, result in results.items():
        sets, by_method = list(result["sets"]), rows_of(result)
        order = sorted(methods, key=lambda m: -by_method[m]["tnr"])
        body = [[f"`{m}`", *(figures(by_method[m], f" {ood}") for ood in sets), figures(by_method[m])] for m in order]
        numbers = f"{result['train']:,} training images, {result['held_out']:,} held out, "
        parts += [f"### {name}", "", f"{numbers}accuracy {100 * result['accuracy']:.2f}%.", ""]
        parts.append(table(["method", *(f"{o} ({result['sets'][o]:,})" for o in sets), "mean"], body))
    return "\n".join(parts)


def figures(row: dict[str, float], of: str = "") -> str:
    return f"{100 * row[f'tnr{of}']:.1f} / {100 * row[f'auroc{of}']:.1f}"


def losses(results: Results, methods: list[str], ours: dict[tuple[str, str], float]) -> str:
    """Pairs on which another method refuses more, by how much."""
    lines = []
    for pair, value in ours.items():
        best = max(methods, key=lambda m: pairs(results, m)[pair])
        ahead = pairs(results, best)[pair] - value
        if ahead > 0:
            lines.append((ahead, [pair[0], pair[1], f"{value:.1f}", f"`{best}`", f"{value + ahead:.1f}"]))
    text = f"On {len(lines)} of {len(ours)} pairs some method refuses more OOD images than the product.\n\n"
    header = ["network", "OOD set", "product", "best method", "its TNR"]
    return text + table(header, [line for _, line in sorted(lines, key=lambda entry: -entry[0])])


def costs(results: Results, methods: list[str]) -> str:
    names = list(results)
    text = "Time to score a sample as a share of the network's forward pass, in batches of 100, on one thread,\n"
    text += "beside other work on the machine: figures of cheap methods are rough.\n\n"
    forward = ["forward pass, µs", *(f"{results[n]['forward_microseconds']:,.0f}" for n in names)]
    shares = [[f"`{m}`", *(f"{100 * rows_of(results[n])[m]['of_forward']:.1f}%" for n in names)] for m in methods]
    return text + table(["method", *names], [forward, *shares])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=Path, default=Path("build/networks"))
    parser.add_argument("--packages", type=Path, default=Path("build/packages"))
    parser.add_argument("--out", type=Path, default=Path("build/comparison"))
    parser.add_argument("--only", action="append", choices=list(SUBJECTS), help="may be repeated")
    parser.add_argument("--page", type=Path, default=Path("docs/comparison.md"))
    parser.add_argument("--notes", type=Path, default=Path("benchmarks/comparison.md"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results: Results = {}
    for name, make in SUBJECTS.items():
        if name not in (args.only or SUBJECTS):
            continue
        path = args.out / f"{name}.json"
        if not path.exists():
            start = time.time()
            path.write_text(json.dumps(measure(make, args.networks, args.packages), indent=1))
            print(f"{name}: {time.time() - start:.0f} s", flush=True)
        results[name] = json.loads(path.read_text())
    if args.only is None:
        args.page.write_text(args.notes.read_text().replace("<!-- tables -->\n", page(results)))
    for name, result in results.items():
        best = ", ".join(f"{row['method']} {100 * row['tnr']:.1f}" for row in result["methods"][:4])
        print(f"{name}: {best}")


if __name__ == "__main__":
    main()
