"""The covariance of any number of rows, in plain NumPy."""

import numpy as np


def inverse_covariance(rows, labels):
    """The inverse (k, k) for rows (N, k) of these classes (N,)."""
    present = sorted(set(labels.tolist()))
    n, k = rows.shape
    within = np.zeros((k, k))
    for c in present:
        apart = rows[labels == c] - rows[labels == c].mean(axis=0)
        within += apart.T @ apart / n
    whole = rows - rows.mean(axis=0)
    covariance = (1 - len(present) / n) * within + len(present) / n * (whole.T @ whole / n)
    share = min(0.5, k / (10 * n))
    covariance = (1 - share) * covariance + share * np.linalg.eigvalsh(covariance).mean() * np.eye(k)
    values, vectors = np.linalg.eigh(covariance)
    values = np.maximum(values, 1e-3 * values.mean())
    return vectors @ np.diag(1 / values) @ vectors.T
