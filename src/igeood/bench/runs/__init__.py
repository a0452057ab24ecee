"""Networks × methods × data sets → results, one JSON line each; a run that was stopped goes on where it was."""

from igeood.bench.runs.cells import run
from igeood.bench.runs.network import Network, load_network
from igeood.bench.runs.plan import PAPER, SETTINGS, Plan
from igeood.bench.runs.results import Lines, Results

__all__ = ["PAPER", "SETTINGS", "Lines", "Network", "Plan", "Results", "load_network", "run"]
