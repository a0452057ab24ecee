"""What one pass over the training data leaves: sums and a bounded sample. Summaries of shards add with ``+``."""

from igeood.summary.needs import Needs, by_correct, by_label, by_prediction, by_unheld_label, held_back
from igeood.summary.sample import Sample
from igeood.summary.summary import BUDGET, Summary
from igeood.summary.sums import ClassSums, LengthSums, unit_rows

__all__ = ["BUDGET", "ClassSums", "LengthSums", "Needs", "Sample", "Summary", "by_correct", "by_label"]
__all__ += ["by_prediction", "by_unheld_label", "held_back", "unit_rows"]
