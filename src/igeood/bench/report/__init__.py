"""A benchmark's results → one self-contained HTML page."""

from igeood.errors import import_extra

for module in ("jinja2", "matplotlib"):
    import_extra(module, "report")

from igeood.bench.report.page import Report, make  # noqa: E402 (they are there)

__all__ = ["Report", "make"]
