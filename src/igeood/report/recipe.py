"""How to redo a benchmark: its commands and digests, from the records."""

import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from igeood.benchmark.results import Record
from igeood.benchmark.summary import NAMED, Key, Summary
from igeood.detectors import METHODS
from igeood.networks import read_weights
from igeood.report.standings import ACCESS

Facts = list[tuple[str, str]]


def commands(ours: Summary, key: Key, network: Record, folder: Path) -> list[str]:
    """The command lines that make a network's results again, in order."""
    weights = folder / network["file"]
    train = _train(weights) if weights.is_file() else []
    return [*train, _bench(ours, key, network, weights if weights.is_file() else Path(network["file"]), folder)]


def _train(weights: Path) -> list[str]:
    """How the weights were trained, if they say it."""
    about = read_weights(weights)[1]
    try:
        recipe = json.loads(about["training"])["recipe"]
        options = ["--data", about["trained_on"], "--out", weights]
        options += [part for name in ("epochs", "batch", "rate", "seed") for part in (f"--{name}", recipe[name])]
        return [line("igeood", "train", about["network"], *options, *([] if recipe["augment"] else ["--no-augment"]))]
    except (KeyError, TypeError, ValueError):
        return []


def _bench(ours: Summary, key: Key, network: Record, weights: Path, folder: Path) -> str:
    cells = [cell for setting in ACCESS for cell in ours.of(setting, key)]
    settings, methods = (list(dict.fromkeys(c[name] for c in cells)) for name in ("setting", "method"))
    named = [c["validation"] for c in cells if c["setting"] in NAMED]
    options: list[Any] = ["--network", f"{key.network}:{weights}", "--in-distribution", key.in_distribution]
    options += _repeated("--ood", dict.fromkeys(c["ood"] for c in cells))
    options += _repeated("--setting", settings)
    options += _repeated("--validation", dict.fromkeys(named))
    options += _repeated("--method", [] if set(methods) >= _all_methods(settings) else methods)
    limits = [c["limit"] for c in cells if c.get("limit")]
    options += ["--limit", limits[0]] if limits else []
    options += ["--images", max([network["test_images"], *map(_whole, cells)]), "--train", network["train_images"]]
    seeds = sorted({c["seed"] for c in cells})
    options += ["--splits", len(seeds)] if "white-box" in settings else []
    return line("igeood", "bench", *options, "--seed", seeds[0], "--out", folder)


def _all_methods(settings: Iterable[str]) -> set[str]:
    """What these settings measure by default, but for the grey box, which takes some of the black box's."""
    white = {setting.startswith("white-box") for setting in settings if setting != "grey-box"}
    return {name for name, method in METHODS.items() if method.needs_layers in white}


def _whole(cell: Record) -> int:
    """Images of a cell's OOD set: the white box has tuned on up to 1,000 of them, or half."""
    measured = int(cell["ood_images"])
    return measured + min(1000, measured) if cell["setting"] == "white-box" else measured


def _repeated(option: str, values: Iterable[str]) -> list[str]:
    return [part for value in values for part in (option, value)]


def line(*parts: object) -> str:
    """A command line, quoted where a shell would need it."""
    first, *others = (shlex.quote(str(part)) for part in parts)
    rows = [first]
    for part in others:
        if part.startswith("--") and len(rows[-1]) + len(part) > 88:
            rows.append(f"    {part}")
        else:
            rows[-1] += f" {part}"
    return " \\\n".join(rows)


def provenance(ours: Summary, key: Key, network: Record) -> Facts:
    """Digests of data and weights, versions and seeds."""
    cells = [cell for setting in ACCESS for cell in ours.of(setting, key)]
    data = {f"{key.in_distribution}, {part}": digest for part, digest in network["data"].items()}
    data |= {f"{cell['ood']}, OOD": cell["data"]["ood"] for cell in cells}
    data |= {f"{c['validation']}, validation": c["data"]["validation"] for c in cells if "validation" in c["data"]}
    versions = sorted({f"igeood {c['igeood']}, torch {c['torch']}" for c in cells})
    return [
        ("Weights", f"{network['file']}, fingerprint {key.weights}"),
        ("Inputs", f"mean {_numbers(network['mean'])}, std {_numbers(network['std'])}"),
        *data.items(),
        ("Made with", "; ".join(versions)),
        ("Seeds", ", ".join(str(seed) for seed in sorted({c["seed"] for c in cells}))),
    ]


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
