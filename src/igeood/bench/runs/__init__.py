"""Networks × methods × data sets → results, one JSON line each; a run that was stopped goes on where it was."""

from igeood.benchmark.cells import run
from igeood.benchmark.network import Network, load_network
from igeood.benchmark.plan import PAPER, SETTINGS, Plan
from igeood.benchmark.results import Lines, Results

__all__ = ["PAPER", "SETTINGS", "Lines", "Network", "Plan", "Results", "load_network", "run"]
