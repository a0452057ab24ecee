"""A benchmark's results → one self-contained HTML page."""

from igeood.bench.datasets.images import extra

for module in ("jinja2", "matplotlib"):
    extra(module, "report")

from igeood.bench.report.page import Report, make  # noqa: E402 (they are there)

__all__ = ["Report", "make"]
