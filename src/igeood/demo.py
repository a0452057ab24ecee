"""A black-box demonstration on data that come with scikit-learn: no download, a few seconds."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split

from igeood.access import black_box
from igeood.detectors import METHODS, detector
from igeood.metrics import Evaluation, evaluate

KNOWN = 8  # digits 0…7 are what the classifier knows; 8 and 9 are out-of-distribution

Logits = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Digits:
    """Logits of a classifier of the digits 0…7; each split has its own samples."""

    train: Logits
    labels: np.ndarray[Any, np.dtype[np.int64]]
    held_out: Logits  # for calibration
    test: Logits
    unseen: Logits  # of digits 8 and 9
    noise: Logits  # of random pixels
    accuracy: float  # on `test`


def make_digits(seed: int = 0) -> Digits:
    """Train a linear classifier on the digits 0…7, and give its logits of every split."""
    images, digits = load_digits(return_X_y=True)
    images = images / 16.0
    known = digits < KNOWN
    x, x_rest, y, y_rest = train_test_split(
        images[known], digits[known], test_size=0.5, random_state=seed, stratify=digits[known]
    )
    x_held, x_test, _, y_test = train_test_split(x_rest, y_rest, test_size=0.5, random_state=seed, stratify=y_rest)
    model = LogisticRegression(max_iter=1000).fit(x, y)
    noise = np.random.default_rng(seed).uniform(size=(500, images.shape[1]))
    logits = model.decision_function
    return Digits(
        logits(x), y, logits(x_held), logits(x_test), logits(images[~known]), logits(noise), model.score(x_test, y_test)
    )


def compare(data: Digits) -> dict[str, tuple[Evaluation, Evaluation]]:
    """Every method at its defaults: how it tells the test digits from the unseen ones, and from noise."""
    results = {}
    for name in (name for name, method in METHODS.items() if not method.needs_layers):
        fitted = detector(name).fit(data.train, data.labels)
        known = fitted.score(data.test)
        results[name] = (evaluate(known, fitted.score(data.unseen)), evaluate(known, fitted.score(data.noise)))
    return results


def run(seed: int = 0, path: str | None = None, console: Console | None = None) -> None:
    """Print the whole demonstration: the comparison, then a calibrated guard at work."""
    out = console or Console()
    data = make_digits(seed)
    out.print(
        f"A linear classifier of the digits 0…{KNOWN - 1}, {100 * data.accuracy:.1f}% right on {len(data.test)} images."
    )
    out.print(f"It has never seen 8 or 9 ({len(data.unseen)} images), nor noise ({len(data.noise)}).\n")
    out.print(_table(compare(data)))
    guard = black_box().fit(data.train, data.labels).calibrate(data.held_out)
    out.print(f"\nThe guard's promise, from {len(data.held_out)} held-out images: {guard.promise}.")
    for what, logits in (("digits 0…7", data.test), ("digits 8, 9", data.unseen), ("noise", data.noise)):
        refused = 100 * float(np.mean(guard.predict(logits).is_ood))
        out.print(f"  {what:<12} {refused:5.1f}% refused")
    if path is not None:
        guard.save(path)
        out.print(f"\nThe guard is in {path}; igeood.load reads it.")


def _table(results: dict[str, tuple[Evaluation, Evaluation]]) -> Table:
    table = Table(title="Out-of-distribution detection by logits only (percent)")
    table.add_column("method")
    for column in ("8, 9: TNR at TPR 95%", "AUROC", "noise: TNR at TPR 95%", "AUROC"):
        table.add_column(column, justify="right")
    for name, pair in results.items():
        table.add_row(name, *(f"{100 * value:.1f}" for e in pair for value in (e.tnr_at_tpr, e.auroc)))
    return table
