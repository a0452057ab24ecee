"""What a guard says of itself: false alarms of honest set-ups over random splits, and what mistaken ones are told.

`python benchmarks/health.py` prints the tables of docs/guarantees.md, section "Health checks".
"""

import argparse
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB, MultinomialNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.tree import DecisionTreeClassifier

import igeood
from igeood.errors import IgeoodWarning, InputError
from igeood.guard import tune
from igeood.outputs import Outputs

Array = NDArray[Any]
KNOWN = 6  # digits that the classifiers know; the others are foreign


@dataclass
class Split:
    """Outputs of one split: training samples with labels, held-out and foreign ones; and the guard for them."""

    train: Any
    labels: Array
    held_out: Any
    ood: Any
    guard: igeood.Guard


def digits(seed: int, n: int = 500) -> tuple[Array, Array, Array, Array]:
    """Training images, their classes, held-out images, and foreign ones."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    x, y = x[order], y[order]
    known = np.flatnonzero(y < KNOWN)
    train, rest = known[: n // 2], known[n // 2 : n]
    return x[train], y[train], x[rest], x[y >= KNOWN][:100]


def blobs(seed: int, n: int = 300) -> tuple[Array, Array, Array, Array]:
    """The same of points in four dimensions about five corners, and foreign ones amid them."""
    draw = np.random.default_rng(seed)
    corners, classes = 3.0 * np.vstack([np.eye(4), np.full(4, 1.0)]), np.arange(2 * n) % 5
    points = corners[classes] + draw.normal(size=(2 * n, 4)) / 2
    return points[:n], classes[:n], points[n:], 1.2 + 0.3 * draw.normal(size=(100, 4))


def words(seed: int) -> tuple[Array, Array, Array, Array]:
    """The same of short texts, as counts of words: topics, and texts without one."""
    draw = np.random.default_rng(seed)
    topics = draw.dirichlet(np.full(200, 0.05), size=5)
    classes = np.arange(500) % 5
    texts = np.stack([draw.multinomial(draw.integers(3, 30), topics[c]) for c in classes])
    foreign = np.stack([draw.multinomial(draw.integers(3, 30), np.full(200, 1 / 200)) for _ in range(100)])
    return texts[:250], classes[:250], texts[250:], foreign


def classified(model: Any, data: tuple[Array, Array, Array, Array], digits: int | None = None, **options: Any) -> Split:
    """Probabilities of a scikit-learn classifier, which is trained here; rounded where asked."""
    x, y, *others = data
    model.fit(x, y)

    def outputs(part: Array) -> Array:
        chances = model.predict_proba(part)
        chances = chances if digits is None else chances.round(digits)
        return chances / chances.sum(axis=1, keepdims=True)

    return Split(outputs(x), y, *map(outputs, others), igeood.black_box(probabilities=True, **options))


def logits(seed: int, classes: int = 10, n: int = 300, margin: float = 8.0, **options: Any) -> Split:
    """Logits of a pretend network: sure where it knows, unsure where it does not."""
    draw = np.random.default_rng(seed)
    labels = np.arange(n) % classes

    def known() -> Array:
        rows = draw.normal(size=(n, classes))
        rows[np.arange(n), labels] += margin * draw.uniform(0.6, 1.0, n)
        return rows

    return Split(known(), labels, known(), 1.5 * draw.normal(size=(100, classes)), igeood.black_box(**options))


def layers(seed: int, method: str) -> Split:
    """Logits with two layers of features about the means of classes, or about nothing."""
    split, draw = logits(seed), np.random.default_rng([seed, 1])
    means = [3.0 * draw.normal(size=(10, width)) for width in (6, 9)]

    def with_features(rows: Array, labels: Array | None) -> Outputs:
        blocks = [draw.normal(size=(len(rows), mean.shape[1])) for mean in means]
        if labels is not None:
            blocks = [block + mean[labels] for block, mean in zip(blocks, means, strict=True)]
        return Outputs(rows, {"early": blocks[0], "late": blocks[1]}, labels)

    parts = [with_features(split.train, split.labels), with_features(split.held_out, split.labels)]
    return Split(parts[0], split.labels, parts[1], with_features(split.ood, None), igeood.white_box(method=method))


def changed(split: Split, change: Callable[[Array], Array], **others: Any) -> Split:
    """The same with other logits."""
    parts = {name: change(getattr(split, name)) for name in ("train", "held_out", "ood")}
    return Split(**{**vars(split), **parts, **others})


def untuned(split: Split) -> Split:
    """The same, of which nothing foreign is known."""
    return Split(**{**vars(split), "ood": None})


def unbalanced(seed: int) -> Split:
    """Half of the samples are of one class, and one in a hundred of another."""
    split, draw = logits(seed, n=1500), np.random.default_rng([seed, 2])
    kept = draw.uniform(size=1500) < np.select([split.labels == 0, split.labels == 9], [1.0, 0.02], 0.12)
    kept[[9, 19]] = True  # of each class there is one
    return Split(split.train[kept], split.labels[kept], split.held_out[kept], split.ood, split.guard)


def two(data: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
    """Two classes of images: those below 3, and the others that are known."""
    x, y, held_out, ood = data
    return x, (y < 3).astype(int), held_out, ood


def with_model(seed: int) -> Split:
    """A network's inputs, some of which are copies within their own set."""
    draw = torch.Generator().manual_seed(seed)
    model, labels = torch.nn.Linear(4, 4), torch.arange(600) % 4
    torch.nn.init.eye_(model.weight)
    x = 6.0 * torch.eye(4)[labels] + torch.randn(600, 4, generator=draw)
    x[:40], x[300:340] = x[40:80], x[340:380]
    guard = igeood.black_box(model, method="max-logit")
    return Split(x[:300], labels[:300].numpy(), x[300:], torch.randn(100, 4, generator=draw), guard)


HONEST: dict[str, Callable[[int], Split]] = {
    "random forest of 10 trees": lambda s: classified(RandomForestClassifier(10, random_state=s), digits(s)),
    "random forest of 100 trees": lambda s: classified(RandomForestClassifier(100, random_state=s), digits(s)),
    "random forest, two classes": lambda s: classified(RandomForestClassifier(30, random_state=s), two(digits(s, 900))),
    "Gaussian naive Bayes": lambda s: classified(GaussianNB(), blobs(s)),
    "decision tree": lambda s: untuned(
        classified(DecisionTreeClassifier(min_samples_leaf=5, random_state=s), digits(s))
    ),
    "5 nearest neighbours": lambda s: classified(KNeighborsClassifier(5), digits(s)),
    "15 nearest neighbours": lambda s: classified(KNeighborsClassifier(15), digits(s)),
    "softmax, 4 decimals": lambda s: classified(LogisticRegression(max_iter=50), digits(s), 4),
    "softmax, 2 decimals": lambda s: classified(LogisticRegression(max_iter=50), digits(s), 2),
    "softmax, 1 decimal, heavy ties": lambda s: classified(LogisticRegression(max_iter=50), digits(s), 1),
    "sets of 30 samples": lambda s: logits(s, 3, n=30),
    "sets of 30 samples, forest": lambda s: classified(RandomForestClassifier(10, random_state=s), blobs(s, 30)),
    "two classes, logits": lambda s: logits(s, 2),
    "1,000 classes": lambda s: untuned(logits(s, 1000, n=1000, margin=14.0)),
    "logits of half precision": lambda s: changed(logits(s), lambda rows: rows.astype(np.float16)),
    "two classes, half precision": lambda s: changed(logits(s, 2), lambda rows: rows.astype(np.float16)),
    "logits in whole numbers": lambda s: changed(logits(s, 4), np.round),
    "logits of masked classes": lambda s: changed(
        logits(s, method="max-logit"), lambda rows: np.where(np.arange(10) == 9, -np.inf, rows)
    ),
    "texts, multinomial naive Bayes": lambda s: classified(MultinomialNB(), words(s)),
    "texts, logistic regression": lambda s: classified(LogisticRegression(max_iter=50), words(s)),
    "one class in a hundred, one in two": unbalanced,
    "energy": lambda s: logits(s, method="energy"),
    "maximum softmax": lambda s: classified(RandomForestClassifier(10, random_state=s), digits(s), method="msp"),
    "ODIN": lambda s: logits(s, method="odin"),
    "Mahalanobis": lambda s: layers(s, "mahalanobis"),
    "IGEOOD": lambda s: layers(s, "igeood"),
    "a model, some inputs twice": with_model,
}


def guard_of(split: Split, *, seed: int = 0) -> igeood.Guard:
    """Fitted, tuned if there are enough samples, and calibrated: on others than tuned on, or by turns on the same."""
    guard, n = split.guard.fit(split.train, split.labels), len(split.held_out)
    if n < 100 or split.ood is None:
        return guard.calibrate(split.held_out)
    parts = (split.held_out[: n // 2], split.held_out[n // 2 :]) if seed % 2 else (split.held_out, split.held_out)
    return guard.tune(parts[0], split.ood).calibrate(parts[1])


def said(steps: Callable[[], igeood.Guard]) -> tuple[list[str], list[str]]:
    """Codes and sentences of the warnings of these steps; an error has the code "error"."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")  # those of scikit-learn
        warnings.simplefilter("always", IgeoodWarning)
        try:
            found = [finding for finding in steps().health if finding.level == "warning"]
        except InputError as error:
            return ["error"], [str(error)]
    texts = [str(each.message) for each in caught if each.category is IgeoodWarning]
    codes = {str(finding): finding.code for finding in found}
    return [codes.get(text, "another warning") for text in texts], texts


class Constant(igeood.Detector):
    """A mistake of somebody's own: it returns the same for all."""

    needs = igeood.Needs(samples=("logits",))

    def score(self, outputs: Outputs) -> torch.Tensor:
        return 0.0 * outputs.logits.sum(dim=1).double()


FOREST, SURE = (lambda: HONEST["random forest of 10 trees"](0)), (lambda: logits(0))
TREE = lambda: classified(DecisionTreeClassifier(random_state=0), digits(0))  # noqa: E731


def fitted(split: Split, change: Callable[[Any], Any] = lambda part: part, labels: Any = None) -> igeood.Guard:
    return split.guard.fit(change(split.train), split.labels if labels is None else labels)


def calibrated(split: Split, rows: Any, **options: Any) -> igeood.Guard:
    return fitted(split).calibrate(rows, **options)


def shuffled(labels: Array) -> Array:
    return np.random.default_rng(0).permutation(labels)


def constant(rows: Array) -> Array:
    """The same logits for each row."""
    return np.zeros_like(rows) + np.eye(rows.shape[1])[0]


def by_ids(step: str) -> igeood.Guard:
    """Outputs that were computed again, and differ by rounding."""
    split, ids = SURE(), [f"{n:04x}-photo" for n in range(7000, 7300)]
    guard, rounded = split.guard.fit(split.train, split.labels, ids=ids), split.train.round(3)
    if step == "tune":
        return guard.tune(split.held_out, Outputs(split.held_out.round(3), ids=ids), ids=ids)
    return guard.calibrate(rounded, ids=ids)


def tuned(split: Split, id_data: Any, ood: Any) -> igeood.Guard:
    return fitted(split).tune(id_data, ood)


MISTAKEN: dict[str, tuple[str, Callable[[], igeood.Guard]]] = {
    "labels shifted by one": ("labels-disagree", lambda: fitted(SURE(), labels=(SURE().labels + 1) % 10)),
    "labels of other rows": ("labels-disagree", lambda: fitted(SURE(), labels=shuffled(SURE().labels))),
    "columns of logits in another order": ("labels-disagree", lambda: fitted(SURE(), lambda rows: rows[:, ::-1])),
    "a network that was never trained": ("labels-disagree", lambda: fitted(logits(0, margin=0.0))),
    "a forest's classes in another order": ("labels-disagree", lambda: fitted(FOREST(), lambda rows: rows[:, ::-1])),
    "sigmoids in place of logits": ("sigmoid-outputs", lambda: fitted(SURE(), lambda rows: 1 / (1 + np.exp(-rows)))),
    "answers of several classes at once": ("sigmoid-outputs", lambda: fitted(SURE(), lambda rows: (rows > 1) * 1.0)),
    "probabilities in place of logits": (
        "probabilities",
        lambda: igeood.black_box().fit(FOREST().train, FOREST().labels),
    ),
    "the same logits for all": ("scores-tied", lambda: fitted(SURE(), constant).calibrate(constant(SURE().held_out))),
    "answers in place of probabilities": ("scores-tied", lambda: calibrated(TREE(), TREE().held_out)),
    "a detector that returns one score": (
        "scores-tied",
        lambda: igeood.black_box(method=Constant()).fit(SURE().train, SURE().labels),
    ),
    "calibrated on the training rows": ("trained-on", lambda: calibrated(SURE(), SURE().train)),
    "calibrated on training rows and a few others": (
        "trained-on",
        lambda: calibrated(SURE(), np.r_[SURE().held_out[:15], SURE().train]),
    ),
    "calibrated on inputs of another scale": ("unlike-training", lambda: calibrated(SURE(), 0.01 * SURE().held_out)),
    "the same scores in calibration, by a method without a training sample": (
        "scores-tied",
        lambda: calibrated(logits(0, method="max-logit"), constant(SURE().held_out)),
    ),
    "calibrated on training ids, rounded": ("trained-on", lambda: by_ids("calibrate")),
    "tuned on training rows": ("tuned-on-training-samples", lambda: tuned(SURE(), SURE().train, SURE().ood)),
    "in-distribution and OOD swapped": ("swapped", lambda: tuned(SURE(), SURE().ood, SURE().held_out)),
    "swapped, and weights are learnt": (
        "swapped",
        lambda: tuned(layers(0, "probe"), layers(0, "probe").ood, layers(0, "probe").held_out),
    ),
    "a forest's sets swapped": ("swapped", lambda: tuned(FOREST(), FOREST().ood, FOREST().held_out)),
    "OOD samples that are in-distribution": (
        "ood-not-refused",
        lambda: tuned(SURE(), SURE().held_out, logits(1).held_out),
    ),
    "the same rows as OOD samples": ("error", lambda: tuned(SURE(), SURE().held_out, SURE().held_out[:100])),
    "the same ids as OOD samples": ("error", lambda: by_ids("tune")),
}


def alarms(name: str, splits: int) -> Iterator[list[str]]:
    """Codes of warnings in each split of an honest set-up."""
    for seed in range(splits):
        yield said(lambda seed=seed: guard_of(HONEST[name](seed), seed=seed))[0]


def votes(n: int, n_trees: int, draw: np.random.Generator, peak: float = 6.0) -> tuple[Array, Array]:
    """Shares of the votes of trees on five classes, and the classes; without a peak, of foreign samples."""
    classes = np.arange(n) % 5
    chances = draw.standard_gamma(0.3 + peak * np.eye(5)[classes])
    return draw.multinomial(n_trees, chances / chances.sum(axis=1, keepdims=True)) / n_trees, classes


def kept_share(n_trees: int, how: str, seed: int, tpr: float, n: int, method: str = "msp") -> float:
    """Share of n fresh in-distribution samples that is kept, with ties: calibrated on the rows tuned on, or others."""
    draw = np.random.default_rng([seed, n_trees])
    guard = igeood.black_box(probabilities=True, method=method).fit(*votes(100, n_trees, draw))
    validation, others = votes(100, n_trees, draw)[0], votes(50, n_trees, draw)[0]
    guard.tune(validation, votes(50, n_trees, draw, peak=0.0)[0])
    guard.calibrate(validation if how == "the same rows" else others, tpr)
    return 1.0 - float(guard.predict(votes(n, n_trees, draw)[0]).is_ood.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--splits", type=int, default=200)
    splits = parser.parse_args().splits
    tune.SWEEP_POINTS = 5  # which temperature is found does not matter here
    tune.REFINEMENTS = 0
    print("| mistaken set-up | code | what the guard says |\n|---|---|---|")
    for name, (_, steps) in MISTAKEN.items():
        codes, texts = said(steps)
        print(f"| {name} | {', '.join(f'`{code}`' for code in codes)} | {' '.join(texts)} |", flush=True)
    print(f"\n| honest set-up | false alarms in {splits} splits | of which |\n|---|---:|---|")
    total = 0
    for name in HONEST:
        found = [codes for codes in alarms(name, splits) if codes]
        total += len(found)
        print(f"| {name} | {len(found)} | {dict(Counter(chain(*found))) or ''} |", flush=True)
    print(f"| all | {total} of {splits * len(HONEST)}, {100 * total / splits / len(HONEST):.2f}% | |")
    warnings.simplefilter("ignore", IgeoodWarning)  # five trees refuse few
    print("\n| trees | calibrated on | kept of fresh samples, at least 90% promised |\n|---:|---|---:|")
    for n_trees in (5, 50):
        for how in ("the same rows", "other rows"):
            kept = [kept_share(n_trees, how, seed, 0.9, 400, "igeood-logits") for seed in range(splits)]
            error = np.std(kept) / splits**0.5
            print(f"| {n_trees} | {how} | {100 * np.mean(kept):.1f}% ± {100 * error:.1f} |", flush=True)


if __name__ == "__main__":
    main()
