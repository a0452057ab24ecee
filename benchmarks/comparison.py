"""Every untuned method on every network of `make networks`: docs/comparison.md and .csv, by `make comparison`.

The first run passes all data through the networks. It keeps their outputs in --out as NAME.safetensors, and the figures
as NAME.json: a run that was stopped goes on. `--method NAME` measures that method anew, in minutes; the figures of
others stay. A network that is not there is left out, and named.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import igeood
from comparison_page import BLACK, OURS, every_figure, page
from igeood.comparison import Comparison
from igeood.errors import InputError
from subjects import BATCH, FAULTS, HEADS, NETWORKS, REAL, WHOLE, Observed, Replay, is_kept, observed, rows_of

ROWS = (1, 2, 5, 20)  # training rows a class
FEW_METHODS = (OURS, "mahalanobis", "mahalanobis++", "relative-mahalanobis", "vim", "knn")


def batched(rows: torch.Tensor, labels: torch.Tensor | None = None) -> list[Any]:
    pieces = rows.split(BATCH)
    return list(pieces) if labels is None else list(zip(pieces, labels.split(BATCH), strict=True))


def compared(network: Observed, methods: Sequence[str] | None = None, rows: torch.Tensor | None = None) -> Comparison:
    """`igeood.compare` of what a network gave; fitted with these training rows alone, if they are given."""
    model = Replay(network).eval()
    chosen = slice(None) if rows is None else rows
    train = rows_of(network, "train")[chosen]
    labels = network.parts["train"]["labels"][chosen]
    ood = {name: batched(rows_of(network, name)) for name in network.sets}
    held_out = batched(rows_of(network, "held out"))
    return igeood.compare(model, batched(train, labels), held_out, ood, methods=methods, layers=model.names)


def measure(name: str, network: Observed, methods: Sequence[str] | None) -> dict[str, Any]:
    table = compared(network, methods)
    return {
        "methods": {row["method"]: row for row in table.rows()},
        "left_out": table.left_out,
        "real": name in REAL or name in HEADS,
        "classes": network.classes,
        "accuracy": network.accuracy,
        "forward": network.forward,
        "near": network.near,
        "far": network.far,
        "counts": {part: len(blocks["logits"]) for part, blocks in network.parts.items()},
    }


def few_rows(network: Observed, methods: Sequence[str]) -> dict[str, dict[str, float | None]]:
    """Mean TNR over the OOD sets with so many training rows a class; None for a method that refuses to be fitted."""
    labels = network.parts["train"]["labels"]

    def rate(method: str, count: int) -> float | None:
        rows = torch.cat([(labels == label).nonzero()[:count, 0] for label in range(network.classes)])
        try:
            return compared(network, [method], rows).rows()[0]["tnr"]
        except InputError as error:
            print(f"{method}, {count} rows a class: {error}", flush=True)
            return None

    return {method: {str(count): rate(method, count) for count in ROWS} for method in methods}


def update(name: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """The figures of a network: those that are kept, and those that have to be measured; None if it is not there."""
    path = args.out / f"{name}.json"
    kept = json.loads(path.read_text()) if path.exists() and not args.anew else None
    if kept is not None and args.method is None:
        return kept
    start = time.time()
    try:
        network = observed(name, args.networks, args.packages, args.out)
    except InputError as error:
        print(f"{name} is left out: {error}", flush=True)
        return None
    read = time.time()
    figures = measure(name, network, None if kept is None else args.method)
    if name == WHOLE:
        few = [method for method in args.few or FEW_METHODS if method in figures["methods"]]
        figures["few rows"] = few_rows(network, few)
    if kept is not None:
        for part in ("methods", "few rows"):
            figures[part] = {**kept.get(part, {}), **figures.get(part, {})}
    path.write_text(json.dumps(figures, indent=1))
    rates = sorted(((row["tnr"], method) for method, row in figures["methods"].items()), reverse=True)
    best = ", ".join(f"{method} {100 * rate:.1f}" for rate, method in rates[:4])
    print(f"{name}: {best} (outputs {read - start:.0f} s, methods {time.time() - read:.0f} s)", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=Path, default=Path("build/networks"))
    parser.add_argument("--packages", type=Path, default=Path("build/packages"))
    parser.add_argument("--out", type=Path, default=Path("build/comparison"))
    parser.add_argument("--only", action="append", choices=[*NETWORKS, FAULTS], help="may be repeated; no page then")
    parser.add_argument("--kept", action="store_true", help="no forward pass: only networks whose outputs are there")
    parser.add_argument("--method", action="append", help="measure this one anew; may be repeated")
    parser.add_argument("--anew", action="store_true", help="measure all methods anew")
    parser.add_argument("--few", action="append", help="method for the table of few rows; may be repeated")
    parser.add_argument("--default", default=OURS, help="the method that others are compared with")
    parser.add_argument("--default-logits", default=BLACK, help="the same of those that read logits alone")
    parser.add_argument("--page", type=Path, default=Path("docs/comparison.md"))
    parser.add_argument("--notes", type=Path, default=Path("benchmarks/comparison.md"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in args.only or (*NETWORKS, FAULTS) if is_kept(args.out, name) or not args.kept]
    figures = {name: update(name, args) for name in names}
    results = {name: result for name, result in figures.items() if result is not None}
    if args.only is None:
        template = args.notes.read_text(encoding="utf-8")
        args.page.write_text(page(template, results, args.default, args.default_logits), encoding="utf-8")
        networks = {name: result for name, result in results.items() if name != FAULTS}
        args.page.with_suffix(".csv").write_text(every_figure(networks), encoding="utf-8")


if __name__ == "__main__":
    main()
