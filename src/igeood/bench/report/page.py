"""The page: what the records say, put into the template."""

import base64
import hashlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from igeood.bench.figures.drawing import look_of
from igeood.bench.report.evidence import Evidence
from igeood.bench.report.standings import ACCESS, Standings, standings
from igeood.bench.runs.averages import METRICS, Averages, Key, title
from igeood.bench.runs.plan import TPR, TUNED_ON
from igeood.bench.runs.results import Record, Results
from igeood.calibration import Calibration
from igeood.errors import InputError
from igeood.files import read_record
from igeood.guard.file import CALIBRATION_FIELDS
from igeood.version import __version__

GUARD = "guard.safetensors"
DRAWN, THUMBNAILS = 18, 96  # OOD sets with figures, and images, that a page has at most: it stays below 2 MB


@dataclass(frozen=True)
class Report:
    """A page, and for each network the verdict's sentences."""

    html: str
    verdicts: dict[str, list[str]]


def make(results: Results, *, made_on: date, guard: Path | None = None, validation: str | None = None) -> Report:
    """Make the report of a benchmark.

    Parameters
    ----------
    results : Results
        A benchmark's.
    made_on : date
        The day that the page shows.
    guard : path, optional
        A guard's file, to say what its threshold promises; by default `guard.safetensors` of the results' folder.
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
        raise InputError(f"results: nothing was measured in {results.folder}; `igeood bench --out {results.folder}`")
    beside, sections = results.folder / GUARD, [_section(ours, *each, len(measured)) for each in measured]
    again = ["igeood", "report", str(results.folder), *([] if validation is None else ["--validation", validation])]
    html = _render(
        sections=sections,
        ours=ours,
        guard=_guard(guard or (beside if beside.is_file() else None), ours.classifiers()),
        tpr=f"{100 * TPR:g}%",
        made_on=made_on,
        again=[shlex.join(line) for line in [*(record["command"] for record in results.commands.records), again]],
    )
    return Report(html, {section["name"]: section["verdict"] for section in sections})


def _section(ours: Averages, key: Key, line: Record, standing: Standings, of: int) -> dict[str, Any]:
    """Everything about one network, as the template calls it."""
    evidence = Evidence(ours, key, standing, max(1, DRAWN // of))
    white, count = evidence.white_row(), max(1, min(8, THUMBNAILS // (2 * of * (len(evidence.drawn) + 1))))
    return {
        "name": str(key),
        "key": key,
        "line": line,
        "counts": {ood: max(row.images.get(ood, 0) for row in standing.rows) for ood in standing.sets},
        "tuned_on_a_set": any(row.setting not in TUNED_ON for row in standing.rows),
        "standing": standing,
        "verdict": standing.verdict(),
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


def _guard(path: Path | None, keys: list[Key]) -> dict[str, Any] | None:
    """A guard's file as the template tells of it: whose it is, and its calibration if it has one."""
    if path is None:
        return None
    record, tensors = read_record(path, "guard")
    known = record["calibration"]
    fields = {name: known[name] for name in CALIBRATION_FIELDS} if known else {}
    calibration = Calibration(tensors["calibration.scores"], **fields) if known else None
    whose = {key.weights: key for key in keys}.get(record["model"], "a network that is not in this report")
    about = {"method": look_of(record["method"]).title, "access": record["access"]}
    return {"file": path.name, "of": whose, "calibration": calibration, **about}


def _render(**content: Any) -> str:
    files = resources.files("igeood.bench.report")
    names = ("template.html", "style.css", "script.js")
    template, style, script = (files.joinpath(name).read_text(encoding="utf-8").strip() for name in names)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    pages = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    pages.filters |= {"set_title": title, "count": "{:,}".format}
    own = {"style": Markup(style), "script": Markup(script), "script_digest": digest}  # noqa: S704 (our own files)
    return pages.from_string(template).render(version=__version__, **own, **content)
