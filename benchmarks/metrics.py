"""The three metrics together at a million scores, beside scikit-learn's, and beside a bare sort of the scores.

python benchmarks/metrics.py
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from igeood.metrics import Evaluation, evaluate
from side_by_side import Row, compare, main, threads

Scores = NDArray[np.float64]


def scikit_learn(inside: Scores, outside: Scores) -> Evaluation:
    """TNR at TPR-95%, AUROC and AUPR by scikit-learn; in-distribution is positive, a high score is not."""
    positive = np.r_[np.ones(len(inside)), np.zeros(len(outside))]
    confidence = -np.r_[inside, outside]
    false_rate, true_rate, _ = roc_curve(positive, confidence, drop_intermediate=False)
    return Evaluation(
        float(1.0 - false_rate[np.argmax(true_rate >= 0.95)]),
        float(roc_auc_score(positive, confidence)),
        float(average_precision_score(positive, confidence)),
    )


def cases() -> Iterator[Row]:
    rng = np.random.default_rng(0)
    drawn = [rng.normal(size=500_000), rng.normal(1.0, 1.0, size=500_000)]
    kinds = {
        "1,000,000 scores": drawn,
        "of float32": [side.astype(np.float32).astype(np.float64) for side in drawn],
        "of 3 decimals": [side.round(3) for side in drawn],
        "of 1 decimal": [side.round(1) for side in drawn],
        "1,000 scores": [side[:500] for side in drawn],
    }
    for _ in threads():
        for case, (inside, outside) in kinds.items():
            ours, theirs = evaluate(inside, outside), scikit_learn(inside, outside)
            apart = max(abs(getattr(ours, name) - getattr(theirs, name)) for name in vars(ours))
            least = 20.0 if len(inside) > 500 else None
            yield from compare(
                case,
                lambda a=inside, b=outside: evaluate(a, b),
                {
                    "scikit-learn": (lambda a=inside, b=outside: scikit_learn(a, b), "least", least),
                    "sorting each side": (lambda a=inside, b=outside: (np.sort(a), np.sort(b)), "most", None),
                },
                note=f"at most {apart:.0e} apart",
            )


if __name__ == "__main__":
    main("Metrics", cases)
