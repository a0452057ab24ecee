"""The page: what the records say, put into the template."""

import base64
import hashlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from importlib import resources
from typing import Any

from markupsafe import Markup

from igeood.bench.report.evidence import Evidence
from igeood.bench.report.standings import ACCESS, Standings, standings
from igeood.bench.runs.averages import METRICS, Averages, Key, title
from igeood.bench.runs.plan import TPR, TUNED_ON
from igeood.bench.runs.results import Record, Results
from igeood.checking.report import render
from igeood.errors import InputError

DRAWN = 18  # OOD sets with figures at most: a page stays below 2 MB
THUMBNAILS = 96  # images at most


@dataclass(frozen=True)
class Report:
    """A page, and for each network who leads."""

    html: str
    methods: dict[str, str]


def make(results: Results, *, made_on: date, validation: str | None = None) -> Report:
    """Make the report of a benchmark.

    Parameters
    ----------
    results : Results
        A benchmark's.
    made_on : date
        The day that the page shows.
    validation : str, optional
        The set that was tuned on, where the results have several.

    Returns
    -------
    Report
        Its `html` needs no other file, and asks nothing of any network.
    """
    ours = Averages(results, validation)
    pairs = zip(ours.classifiers(), ours.networks, strict=True)
    measured = [(key, line, standing) for key, line in pairs if (standing := standings(ours, key)) is not None]
    if not measured:
        cure = f"run `igeood bench --out {results.folder}`"
        raise InputError(f"nothing was measured in {results.folder}", argument="results", cure=cure)
    sections = [_section(ours, *each, len(measured)) for each in measured]
    again = ["igeood", "report", str(results.folder)]
    again += [] if validation is None else ["--validation", validation]
    commands = [shlex.join(line) for line in [*(record["command"] for record in results.commands.records), again]]
    about = {"tpr": f"{100 * TPR:g}%", "made_on": made_on, "again": commands}
    html = _render(sections=sections, ours=ours, **about)
    return Report(html, {section["name"]: section["standing"].lead() for section in sections})


def _section(ours: Averages, key: Key, line: Record, standing: Standings, of: int) -> dict[str, Any]:
    """Everything about one network, as the template calls it."""
    evidence = Evidence(ours, key, standing, max(1, DRAWN // of))
    white = evidence.white_row()
    count = max(1, min(8, THUMBNAILS // (2 * of * (len(evidence.drawn) + 1))))
    return {
        "name": str(key),
        "key": key,
        "line": line,
        "counts": {ood: max(row.images.get(ood, 0) for row in standing.rows) for ood in standing.sets},
        "tuned_on_a_set": any(row.setting not in TUNED_ON for row in standing.rows),
        "standing": standing,
        "tables": [_tabulate(standing, *item) for item in METRICS.items()],
        "evidence": evidence,
        "tuning": list(evidence.tuning()),
        "white": white,
        "contributions": [] if white is None else list(evidence.contributions(white)),
        "pictures": evidence.pictures(count),
        "provenance": list(_provenance(ours, key, line)),
    }


def _provenance(ours: Averages, key: Key, line: Record) -> Iterator[tuple[str, str]]:
    """Digests of data and weights, versions and seeds."""
    cells = [cell for setting in ACCESS for cell in ours.of(setting, key)]
    yield "Weights", f"{line['file']}, fingerprint {key.weights}"
    yield "Inputs", "; ".join(f"{name} {', '.join(f'{v:.4g}' for v in line[name])}" for name in ("mean", "std"))
    digests = {f"{key.in_distribution}, {part}": digest for part, digest in line["data"].items()}
    digests |= {f"{cell['ood']}, OOD": cell["data"]["ood"] for cell in cells}
    digests |= {f"{c['validation']}, validation": c["data"]["validation"] for c in cells if "validation" in c["data"]}
    yield from digests.items()
    yield "Made with", "; ".join(sorted({f"igeood {c['igeood']}, torch {c['torch']}" for c in cells}))
    yield "Seeds", ", ".join(str(seed) for seed in sorted({c["seed"] for c in cells}))


def _tabulate(standing: Standings, metric: str, name: str) -> dict[str, Any]:
    """One metric's table: for each group its methods with their percentages, the average last, the best marked."""
    groups = {}
    for group, rows in standing.groups().items():
        exact = [[*(row.figures[metric].get(o) for o in standing.sets), standing.average(row, metric)] for row in rows]
        values = [[None if value is None else round(value, 1) for value in line] for line in exact]
        known = [{value for value in column if value is not None} for column in zip(*values, strict=True)]
        best = [max(column) if len(column) > 1 else -1.0 for column in known]  # none where all are the same
        groups[group] = {
            row.name: [{"value": v, "best": v == b} for v, b in zip(line, best, strict=True)]
            for row, line in zip(rows, values, strict=True)
        }
    return {"metric": metric, "title": name, "header": [*map(title, standing.sets), "average"], "groups": groups}


def _render(**content: Any) -> str:
    script = resources.files("igeood.bench.report").joinpath("script.js").read_text(encoding="utf-8").strip()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    own = {"script": Markup(script), "script_digest": digest}  # noqa: S704 (our own file)
    return render("igeood.bench.report", {"set_title": title}, **own, **content)
