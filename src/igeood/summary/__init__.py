"""What one pass over the training data leaves: sums and a bounded sample. Summaries of shards add with ``+``."""

from igeood.summary.needs import Needs
from igeood.summary.sample import Sample
from igeood.summary.sums import ClassSums
from igeood.summary.total import BUDGET, Summary

__all__ = ["BUDGET", "ClassSums", "Needs", "Sample", "Summary"]
