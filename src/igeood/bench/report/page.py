"""The page: what the records say, put into the template."""

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from igeood.benchmark.results import Record, Results
from igeood.benchmark.summary import NAMED, Key, Summary, title
from igeood.errors import IgeoodError, InputError
from igeood.report import recipe
from igeood.report.drawing import Artist
from igeood.report.evidence import Evidence
from igeood.report.promise import promises
from igeood.report.standings import METRICS, Standings, standings
from igeood.version import __version__

GUARD = "guard.safetensors"
DRAWN, THUMBNAILS = 18, 96  # OOD sets whose figures, and images, that a page has at most: it stays below 2 MB
MISSING = "–"


@dataclass(frozen=True)
class Report:
    """A page, and for each network the verdict's sentences."""

    html: str
    verdicts: dict[str, list[str]]


@dataclass(frozen=True)
class Cell:
    """A figure of the table in percent, and whether it is the best of its group."""

    value: float | None
    best: bool

    @property
    def text(self) -> str:
        """The figure as it is printed."""
        return MISSING if self.value is None else f"{self.value:.1f}"


@dataclass(frozen=True)
class Table:
    """One metric's: a header, and for each group its methods with their cells, the average last."""

    metric: str
    title: str
    header: list[str]
    groups: dict[str, dict[str, list[Cell]]]


def make(results: Results, *, made_on: date, guard: Path | None = None, validation: str | None = None) -> Report:
    """Make the report of a benchmark.

    Parameters
    ----------
    results : Results
        A benchmark's.
    made_on : date
        The day that the page tells.
    guard : path, optional
        A guard's file, to tell what its threshold promises; by default `guard.safetensors` of the results' folder.
    validation : str, optional
        The set that was tuned on, where the results have several.

    Returns
    -------
    Report
        Its `html` needs no other file, and asks nothing of any network.
    """
    try:
        return _make(results, made_on, guard, validation)
    except KeyError as error:
        where = f"a line of {results.cells.path}, or of a file beside it,"
        raise InputError(f"results: {where} has no {error}; run the benchmark") from None
    except IgeoodError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RuntimeError) as error:
        where = f"{results.cells.path}, or a file beside it,"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"results: {where} is damaged ({reason}); run the benchmark in another folder") from None


def _make(results: Results, made_on: date, guard: Path | None, validation: str | None) -> Report:
    ours = Summary(results, validation)
    pairs = zip(ours.classifiers(), ours.networks, strict=True)
    found = [(key, line, standing) for key, line in pairs if (standing := standings(ours, key)) is not None]
    if not found:
        raise InputError(f"results: nothing was measured in {results.folder}; `igeood bench --out {results.folder}`")
    beside = results.folder / GUARD
    told = promises(guard or (beside if beside.is_file() else None), [key for key, _, _ in found], found[0][2].tpr)
    artist = Artist()
    sections = [
        _section(ours, key, line, Evidence(ours, key, standing, artist, max(1, DRAWN // len(found))), len(found))
        for key, line, standing in found
    ]
    again = ["igeood", "report", str(results.folder), *([] if validation is None else ["--validation", validation])]
    html = _render(sections, told, made_on, [*recipe.commands(results), recipe.line(*again)])
    return Report(html, {section["name"]: section["verdict"] for section in sections})


def _section(ours: Summary, key: Key, line: Record, evidence: Evidence, of: int) -> dict[str, Any]:
    """Everything about one network, as the template calls it."""
    standing, white = evidence.standing, evidence.white_row()
    count = max(1, min(8, THUMBNAILS // (2 * of * (len(evidence.drawn) + 1))))
    pictures = evidence.pictures(count)
    return {
        "name": str(key),
        "facts": list(_facts(ours, key, line, standing)),
        "verdict": standing.verdict(),
        "by_access": standing.by_access(),
        "tables": [tabulate(standing, metric) for metric in METRICS],
        "shown": str(standing.shown),
        "compared": "" if len(standing.compared) == len(standing.sets) else ", ".join(map(title, standing.compared)),
        "drawn": evidence.note(),
        "histograms": evidence.histograms(),
        "curves": evidence.threshold_curves(),
        "curves_of": [str(row) for row in standing.families()],
        "tuning": evidence.tuning(),
        "validation": title(ours.validation),
        "contributions": [] if white is None else evidence.contributions(white),
        "contributions_of": str(white or ""),
        "pictures": pictures,
        "reasons": any(image.reason for set_ in pictures for side in set_.sides.values() for image in side),
        "provenance": recipe.provenance(ours, key, line),
    }


def _facts(ours: Summary, key: Key, line: Record, standing: Standings) -> Iterator[tuple[str, str]]:
    """What was run, in words."""
    nearest = f"{100 * line['accuracy_fisher_rao']:.1f}% by the nearest Fisher–Rao centroid"
    yield "Network", f"{key.network} ({line['file']}), {line['classes']} classes"
    yield "Accuracy", f"{100 * line['accuracy']:.1f}% right on {line['test_images']:,} test images ({nearest})"
    yield "In-distribution", f"{title(key.in_distribution)}, {line['train_images']:,} training images"
    counts = {ood: max(row.images.get(ood, 0) for row in standing.rows) for ood in standing.sets}
    yield "OOD sets", ", ".join(f"{title(ood)} ({n:,} images)" for ood, n in counts.items())
    if any(row.setting in NAMED for row in standing.rows):
        none = "none: black and grey box keep their defaults"
        yield "Validation set", none if ours.validation == "none" else title(ours.validation)
    for note in line.get("notes", []):
        yield "Note", note
    left = sum(ours.left_out.values())
    if left:
        yield "Left out", f"{left:,} results that were measured with other options than these"


def tabulate(standing: Standings, metric: str) -> Table:
    """A metric of all methods, by access."""
    names = {"tnr": f"TNR at TPR-{100 * standing.tpr:g}%", "auroc": "AUROC", "aupr": "AUPR"}
    groups = {}
    for group, rows in standing.groups().items():
        values = [[*(row.figures[metric].get(o) for o in standing.sets), standing.average(row, metric)] for row in rows]
        best = [_best(column) for column in zip(*values, strict=True)]
        groups[group] = {
            row.name: [Cell(v, v is not None and f"{v:.1f}" == b) for v, b in zip(line, best, strict=True)]
            for row, line in zip(rows, values, strict=True)
        }
    return Table(metric, names[metric], [*map(title, standing.sets), "average"], groups)


def _best(values: Iterable[float | None]) -> str | None:
    """The highest as it is printed; None where all are the same."""
    known = [value for value in values if value is not None]
    return f"{max(known):.1f}" if len({f"{value:.1f}" for value in known}) > 1 else None


def _render(sections: list[dict[str, Any]], told: list[str], made_on: date, again: list[str]) -> str:
    files = resources.files("igeood.report")
    names = ("template.html", "style.css", "script.js")
    template, style, script = (files.joinpath(name).read_text(encoding="utf-8").strip() for name in names)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    pages = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    pages.filters["code"] = _code
    own = {"style": Markup(style), "script": Markup(script), "script_digest": digest}  # noqa: S704 (our own files)
    about = {"made_on": made_on.isoformat(), "version": __version__}
    return pages.from_string(template).render(sections=sections, promises=told, again=again, **about, **own)


def _code(text: str) -> Markup:
    """Text whose parts between backticks are code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 (escaped)
