"""Runs the service: its socket, its keys, its signals."""

import asyncio
import signal
import socket
import stat
import warnings
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from igeood.errors import IgeoodWarning, InputError
from igeood.serve.log import say
from igeood.serve.service import Service

PATIENCE = 60  # seconds for requests in flight, once the process was told to stop
GRACE = 0.5  # seconds in which connections are still taken: what was sent before the signal is answered
LOCAL = ("127.0.0.1", "::1", "localhost")


def read_keys(path: Path | None) -> list[str]:
    """Keys from a file, one a line; empty lines and those that start with # do not count."""
    if path is None:
        return []
    try:
        keys = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except UnicodeDecodeError:
        raise InputError(f"key_file: {path} is no text; write one key on each line") from None
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:
        raise InputError(f"key_file: {path} has no key; write one on each line")
    if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        warnings.warn(f"key_file: others can read {path}; run `chmod 600 {path}`", IgeoodWarning, stacklevel=2)
    return keys


def listen(host: str, port: int, *, has_keys: bool) -> socket.socket:
    """A socket that listens there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        cure = "stop what listens there, or name another --port"
        raise InputError(f"port: cannot listen on {host}:{port} ({error.strerror or error}); {cure}") from None
    if host not in LOCAL and not has_keys:
        problem = f"host: everyone who reaches {host} can send inputs"
        warnings.warn(f"{problem}; give keys with --key-file", IgeoodWarning, stacklevel=2)
    return listener


def run(app: ASGIApp, service: Service, listener: socket.socket) -> None:
    """Serve until a signal says to stop; requests in flight are finished. SIGHUP loads the guard's file again."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the loop takes it: it would end the process
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    promise = service.served.calibration.promise
    say("serving", address=address, name=service.name, method=service.served.title, promise=promise)
    config = uvicorn.Config(
        _Living(app, service), log_config=None, access_log=False, lifespan="on", log_level="warning",
        timeout_graceful_shutdown=PATIENCE, server_header=False, proxy_headers=False,
    )  # fmt: skip
    _Server(config, service).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Notes at once that it is to stop: answers then say that their connection ends, so that no request follows."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal to stop."""
        self._service.is_stopping = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take in what was sent before the signal, then end."""
        await asyncio.sleep(GRACE)
        await super().shutdown(sockets)


class _Living:
    """The application, with what starts and ends with the loop."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            return await self._app(scope, receive, send)
        await receive()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._service.reload)
        self._service.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._service.stop()
        say("stopped", inputs=self._service.watch.inputs)
        await send({"type": "lifespan.shutdown.complete"})
        return None
