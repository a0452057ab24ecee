"""A guard behind HTTP."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Options:
    """How a service works; the options of `igeood serve`."""

    name: str = "guard"
    max_waiting: int = 256
    max_batch: int = 64
    max_delay: float = 0.002
    state: Path | None = None
    run_length: float = 1_000_000.0
    kind: Literal["p-values", "flags"] = "p-values"
    keep_flagged: Path | None = None
    keep: int = 100
    seed: int = 0
