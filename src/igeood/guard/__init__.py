"""Guards: a model, a detector, an input step and a threshold together."""

from igeood.guard.build import black_box, grey_box, white_box
from igeood.guard.explain import Explanation
from igeood.guard.file import load
from igeood.guard.guard import Guard
from igeood.guard.training import summarise
from igeood.guard.verdict import Judgement, Verdict

__all__ = ["Explanation", "Guard", "Judgement", "Verdict", "black_box", "grey_box", "load", "summarise", "white_box"]
