"""One's own guard on one's own data: what it keeps, what it catches, and what fails in silence."""

from igeood.checking.check import check
from igeood.checking.result import Check

__all__ = ["Check", "check"]
