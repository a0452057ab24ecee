"""A benchmark's results → one self-contained HTML page."""

from importlib.util import find_spec

from igeood.errors import MissingExtraError

if not (find_spec("jinja2") and find_spec("matplotlib")):
    raise MissingExtraError("reports need jinja2 and matplotlib; pip install 'igeood[report]'")

from igeood.bench.report.page import Report, make

__all__ = ["Report", "make"]
