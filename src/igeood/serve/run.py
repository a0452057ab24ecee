"""Runs the service: its socket, its keys, its signals."""

import asyncio
import signal
import socket
import stat
import warnings
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from igeood.errors import IgeoodWarning, InputError
from igeood.serve.log import say
from igeood.serve.service import Service

PATIENCE = 60  # seconds for requests in flight, once the process was told to stop
GRACE = 0.5  # seconds in which connections are still taken: what was sent before the signal is answered
LOCAL = ("127.0.0.1", "::1", "localhost")


def read_keys(path: Path) -> list[str]:
    """Keys from a file, one a line; empty lines and those that start with # do not count."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except UnicodeDecodeError:
        lines = []
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise InputError(f"{path} has no key", argument="key_file", cure="write one on each line, as text")
    if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        warnings.warn(f"key_file: others can read {path}; run `chmod 600 {path}`", IgeoodWarning, stacklevel=2)
    return keys


def listen(host: str, port: int, *, has_keys: bool) -> socket.socket:
    """A socket that listens there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        what = f"cannot listen on {host}:{port} ({error.strerror or error})"
        raise InputError(what, argument="port", cure="stop what listens there, or choose another {port}") from None
    if host not in LOCAL and not has_keys:
        problem = f"host: everyone who reaches {host} can send inputs"
        warnings.warn(f"{problem}; give keys with --key-file", IgeoodWarning, stacklevel=2)
    return listener


def run(app: ASGIApp, service: Service, listener: socket.socket) -> None:
    """Serve until a signal says to stop; requests in flight are finished. SIGHUP loads the guard's file again."""
    signal.signal(signal.SIGHUP, lambda *_: service.reload())
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    promise = service.served.calibration.promise
    say("serving", address=address, name=service.name, method=service.served.title, promise=promise)
    config = uvicorn.Config(app, log_config=None, lifespan="off", server_header=False, proxy_headers=False)
    config.timeout_graceful_shutdown = PATIENCE
    _Server(config, service).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Starts and ends the service with its loop; answers say at once, after a signal, that their connection ends."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start."""
        self._service.start()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take a signal to stop."""
        self._service.is_stopping = True
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take in what was sent before the signal, then end."""
        await asyncio.sleep(GRACE)
        await super().shutdown(sockets)
        await asyncio.to_thread(self._service.close)
        say("stopped", inputs=self._service.watch.value("igeood_inputs_total"))
