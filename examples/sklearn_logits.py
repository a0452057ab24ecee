"""A classifier that is not PyTorch's: arrays of logits, or of probabilities, from scikit-learn."""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier

import igeood


def report(guard: igeood.Guard, known: np.ndarray, foreign: np.ndarray) -> None:
    """Print what is refused, and how well the scores tell the two kinds apart."""
    for name, outputs in (("digits 0…7", known), ("digits 8, 9", foreign)):
        print(f"  {name:<12} {100 * guard.predict(outputs).is_ood.mean():5.1f}% refused")
    print(f"  AUROC {igeood.metrics.auroc(guard.score(known), guard.score(foreign)):.3f}")


def main() -> None:
    """Guard two classifiers of the digits 0…7, which have never seen 8 or 9."""
    images, digits = load_digits(return_X_y=True)
    images = images / 16
    known, foreign = digits < 8, images[digits >= 8]
    order = np.random.default_rng(0).permutation(known.sum())
    x, y = images[known][order], digits[known][order]
    train, held_out, test = slice(0, 700), slice(700, 1050), slice(1050, None)

    logits = LogisticRegression(max_iter=1000).fit(x[train], y[train]).decision_function
    guard = igeood.black_box().fit(logits(x[train]), y[train]).calibrate(logits(x[held_out]), tpr=0.95)
    print("logistic regression, decision_function as logits:")
    report(guard, logits(x[test]), logits(foreign))

    proba = MLPClassifier(100, max_iter=1000, random_state=0).fit(x[train], y[train]).predict_proba
    guard = igeood.black_box(probabilities=True).fit(proba(x[train]), y[train]).calibrate(proba(x[held_out]), tpr=0.95)
    print("neural network, predict_proba as probabilities:")
    report(guard, proba(x[test]), proba(foreign))
    verdict = guard.predict(proba(foreign[:3]))
    print(f"three foreign digits: answers {verdict.label.tolist()}, p-values {verdict.p_value.round(4).tolist()}")


if __name__ == "__main__":
    main()
