"""docs/pictures/geometry.png: the two geometries that scores are made of, drawn with the library's own distances.

python benchmarks/geometry.py
"""

import math
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch

from igeood.geometry import categorical, gaussian

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

OUT = Path(__file__).parent.parent / "docs" / "pictures" / "geometry.png"
CORNERS = np.array([[0.0, 0.0], [1.0, 0.0], [0.5, math.sqrt(3) / 2]])
CENTROIDS = torch.tensor([[0.9, 0.06, 0.04], [0.05, 0.9, 0.05], [0.05, 0.07, 0.88]], dtype=torch.float64)
PAIRS = ((-2.0, 0.5), (2.0, 0.5)), ((-2.0, 2.0), (2.0, 2.0))  # mean and deviation of two Gaussians, twice


def simplex(axes: Axes) -> None:
    """Distances of softmax outputs of three classes to the nearest centroid (Eq. 2)."""
    steps = 240
    shares = [(a, b, steps - a - b) for a in range(1, steps) for b in range(1, steps - a)]
    p = torch.tensor(shares, dtype=torch.float64) / steps
    nearest = categorical.pairwise_distance(p.log(), CENTROIDS.log()).amin(dim=1).numpy()
    x, y = (p.numpy() @ CORNERS).T
    filled = axes.tricontourf(x, y, nearest, levels=np.linspace(0, 1.3, 14), cmap="Blues_r")
    axes.figure.colorbar(filled, ax=axes, shrink=0.8, label="distance to the nearest centroid")
    axes.plot(*(CENTROIDS.numpy() @ CORNERS).T, "o", color="#D55E00", label="class centroids (Eq. 3)")
    for corner, name, where in zip(CORNERS, "ABC", ("right", "left", "center"), strict=True):
        axes.text(*(1.07 * corner - 0.07 * CORNERS.mean(axis=0)), name, ha=where, va="center")
    axes.set_title("Softmax outputs of three classes", pad=20)
    axes.legend(loc="upper left", bbox_to_anchor=(-0.12, 1.0), frameon=False, fontsize=8)
    axes.set_axis_off()
    axes.set_aspect("equal")


def half_plane(axes: Axes) -> None:
    """Shortest paths between Gaussians (Eq. 9): half circles in the plane of μ/√2 and σ."""
    for ((left, std), (right, _)), colour in zip(PAIRS, ("#D55E00", "#0072B2"), strict=True):
        centre, reach = (left + right) / 2, (right - left) / 2 / math.sqrt(2)
        radius, first = math.hypot(reach, std), math.atan2(std, reach)
        angle = np.linspace(first, math.pi - first, 200)
        means = [torch.tensor(value, dtype=torch.float64) for value in (left, right, std)]
        distance = float(gaussian.univariate_distance(means[0], means[2], means[1], means[2]))
        axes.plot(centre + math.sqrt(2) * radius * np.cos(angle), radius * np.sin(angle), color=colour)
        axes.plot([left, right], [std, std], "o", color=colour, label=f"σ = {std:g}: distance {distance:.2f}")
    axes.set(xlabel="mean μ of a channel", ylabel="deviation σ", ylim=(0, 3), title="Gaussians of one channel")
    axes.text(0, 0.12, "the same difference of means counts for more where σ is small", ha="center", fontsize=8)
    axes.legend(loc="upper right", frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    simplex(left)
    half_plane(right)
    figure.savefig(OUT, dpi=130)
    print(OUT)


if __name__ == "__main__":
    main()
