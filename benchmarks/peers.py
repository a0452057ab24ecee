"""Methods beside figures that independent code measured on the same rows, with $IGEOOD_DATA set.

The network is DenseNet-BC-100 of CIFAR-10. Training rows are the first 2,000 images; 1,000 test images and 1,000 of
each OOD set are evenly spaced. Regressions learn from one half of the rows and are measured on the other. Outputs are
kept in --out. A TNR of 1,000 images has a standard error of about 3 points.
"""

import argparse
from pathlib import Path

import numpy as np

import igeood
import igeood.bench.methods
from igeood.bench.datasets import data_root, load
from igeood.bench.runs import load_network
from igeood.bench.runs.observing import Observer
from igeood.metrics import evaluate
from igeood.outputs import Outputs

SETS = ("tiny-imagenet", "chars74k", "tiny-imagenet-nearest")
# method, its options, whether it learns from OOD samples: TNR and AUROC of independent code on these sets
REFERENCE = [
    ("gram", {}, False, ((22.3, 70.6), (80.2, 96.0), (97.7, 99.4))),
    ("batch-norm", {}, False, ((10.5, 52.5), (66.8, 93.5))),
    ("batch-norm", {"columns": "fisher-rao"}, True, ((36.5, 81.6), (96.7, 99.2))),
    ("batch-norm", {"columns": "layers"}, True, ((75.7, 94.6), (99.2, 99.8))),
    ("batch-norm", {"columns": "channels"}, True, ((82.3, 95.6), (99.4, 99.8))),
]
CROSSED = ("layers", ((13.1, 69.7), (42.7, 83.3)))  # these columns, where the regression learns from the other set


def measured(detector: igeood.Detector, inside: Outputs, outside: Outputs, learns: bool) -> tuple[float, float]:
    """TNR and AUROC in percent; of a regression the mean over both halves."""
    results = []
    for half in (0, 1) if learns else (None,):
        if half is None:
            pair = [inside, outside]
        else:
            detector.learn_weights(inside[half::2], outside[half::2], tpr=0.95, seed=0)
            pair = [inside[1 - half :: 2], outside[1 - half :: 2]]
        rates = evaluate(*(detector.score(part) for part in pair))
        results.append((100 * rates.tnr_at_tpr, 100 * rates.auroc))
    tnr, auroc = np.mean(results, axis=0).tolist()
    return tnr, auroc


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/peers"), help="where outputs are kept")
    parser.add_argument("--method", action="append", help="all of them by default")
    given = parser.parse_args()
    network = load_network(str(data_root() / "weights" / "densenet-bc-100-cifar10.safetensors"))
    observer = Observer(network, given.out, lambda *done: print(*done, flush=True))
    train, test = load("cifar-10", split="train")[:2000], load("cifar-10", split="test", limit=1000)
    print(f"{'method':<32}{'set':<24}{'TNR':>6}{'AUROC':>7}   independent code's")
    for method, options, learns, figures in REFERENCE:
        if given.method and method not in given.method:
            continue
        needs = igeood.METHODS[method].needs
        detector = igeood.detector(method, **options).fit(observer.outputs(train, needs, "train"))
        inside = observer.outputs(test, needs)
        name = " ".join([method, *options.values(), *["tuned"] * learns])
        for ood, theirs in zip(SETS, figures, strict=False):
            tnr, auroc = measured(detector, inside, observer.outputs(load(ood, limit=1000), needs), learns)
            print(f"{name:<32}{ood:<24}{tnr:6.1f}{auroc:7.1f}   {theirs[0]} / {theirs[1]}", flush=True)
        if options.get("columns") == CROSSED[0]:
            for ood, other, theirs in zip(SETS, SETS[1::-1], CROSSED[1], strict=False):
                detector.learn_weights(inside, observer.outputs(load(other, limit=1000), needs), tpr=0.95, seed=0)
                tnr, auroc = measured(detector, inside, observer.outputs(load(ood, limit=1000), needs), False)
                print(f"{f'… tuned on {other}':<32}{ood:<24}{tnr:6.1f}{auroc:7.1f}   {theirs[0]} / {theirs[1]}")


if __name__ == "__main__":
    main()
