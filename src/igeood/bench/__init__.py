"""The laboratory: data sets, networks, benchmark runs, figures, report, the paper's tables, demonstration.

`igeood.bench.methods` registers the paper's other systems.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from igeood.bench.adversarial import fgsm

__all__ = ["fgsm"]


def __getattr__(name: str) -> Any:
    if name != "fgsm":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from igeood.bench.adversarial import fgsm  # noqa: PLC0415 (torch is slow to import)

    return fgsm
