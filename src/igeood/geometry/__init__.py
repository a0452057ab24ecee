"""Fisher–Rao geometry: softmax outputs (`categorical`) and diagonal Gaussians (`gaussian`)."""

from igeood.geometry import categorical, gaussian

__all__ = ["categorical", "gaussian"]
