"""The service's log: lines of JSON on stderr."""

import logging
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import orjson


def say(event: str, **fields: Any) -> None:
    """Write a line."""
    now = time.time()
    stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03d}Z"
    with suppress(OSError, ValueError):  # nobody reads it any more: the service goes on
        sys.stderr.write(f"{orjson.dumps({'time': stamp, 'event': event, **fields}, default=str).decode()}\n")


class Lines(logging.Handler):
    """Messages of libraries as lines of JSON."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message, with its traceback if it has one."""
        trace = logging.Formatter().formatException(record.exc_info) if record.exc_info else None
        fields = {"level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        say("log", **fields, **({"traceback": trace} if trace else {}))


@contextmanager
def json_log() -> Iterator[None]:
    """Messages of libraries, and warnings, go to this log."""
    loggers = [logging.getLogger(name) for name in ("igeood", "uvicorn.error")]
    lines, before, shown = Lines(), [logger.propagate for logger in loggers], warnings.showwarning
    for logger in loggers:
        logger.addHandler(lines)
        logger.propagate = False
    warnings.showwarning = lambda message, *_, **__: say("warning", message=str(message))
    try:
        yield
    finally:
        warnings.showwarning = shown
        for logger, propagate in zip(loggers, before, strict=True):
            logger.removeHandler(lines)
            logger.propagate = propagate
