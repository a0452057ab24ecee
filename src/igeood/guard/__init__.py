"""Guards: a model, a detector, an input step and a threshold together."""

from igeood.guard.build import black_box, grey_box, white_box
from igeood.guard.compare import Comparison, compare
from igeood.guard.explain import Explanation
from igeood.guard.file import load
from igeood.guard.guard import Guard, Verdict, summarise

__all__ = [
    "Comparison", "Explanation", "Guard", "Verdict", "black_box", "compare", "grey_box", "load", "summarise",
    "white_box",
]  # fmt: skip
