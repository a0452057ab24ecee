"""The service's log: lines of JSON on stderr, written through `logging`."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

import orjson

log = logging.getLogger("igeood.serve")
log.setLevel(logging.INFO)


def say(event: str, **fields: Any) -> None:
    """Log an event with its fields."""
    log.info(event, extra={"fields": fields})


class _JsonLines(logging.Formatter):
    """A line for each event, and for each message of a library."""

    def format(self, record: logging.LogRecord) -> str:
        """A record as a line of JSON."""
        moment = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line = {"time": moment, "event": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


@contextmanager
def json_log() -> Iterator[None]:
    """Send log messages and warnings to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonLines())
    root = logging.getLogger()
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: say("warning", message=str(message))
        root.addHandler(handler)
        try:
            yield
        finally:
            root.removeHandler(handler)
