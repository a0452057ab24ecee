"""How to redo a benchmark: its commands and digests, from the records."""

import shlex
from collections.abc import Iterable

from igeood.benchmark.results import Record, Results
from igeood.benchmark.summary import Key, Summary
from igeood.report.standings import ACCESS

Facts = list[tuple[str, str]]


def commands(results: Results) -> list[str]:
    """The command lines that made the results, in order; none if they were made from Python."""
    return [line(*record["command"]) for record in results.commands.records]


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
