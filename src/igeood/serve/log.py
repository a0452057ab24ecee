"""The service's log: lines of JSON on stderr, written through `logging`."""

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson

log = logging.getLogger("igeood.serve")
log.setLevel(logging.INFO)


def say(event: str, **fields: Any) -> None:
    """Log an event with its fields."""
    log.info(event, extra={"fields": {"event": event, **fields}})


class _JsonLines(logging.Formatter):
    """Events with their fields, and messages of libraries."""

    def format(self, record: logging.LogRecord) -> str:
        """A record as a line of JSON."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        message = {"event": "log", "level": record.levelname.lower(), "logger": record.name}
        line = getattr(record, "fields", {**message, "message": record.getMessage()})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps({"time": f"{stamp}.{int(record.msecs):03d}Z", **line}, default=str).decode()


@contextmanager
def json_log() -> Iterator[None]:
    """Send the messages of igeood and uvicorn, and warnings, to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonLines())
    loggers = [logging.getLogger(name) for name in ("igeood", "uvicorn.error")]
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: say("warning", message=str(message))
        for logger in loggers:
            logger.addHandler(handler)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeHandler(handler)
