"""`igeood serve`: a guard behind HTTP."""

import re
from pathlib import Path
from typing import Any

import click

from igeood.cli._shared import load_model, model_options, quantity, size_of
from igeood.errors import import_extra
from igeood.serve import Options
from igeood.terminal import FILE, FOLDER, seed_option

KIND = click.Choice(["p-values", "flags"])
COUNT = click.IntRange(min=1)
_LENGTH = "Inputs that pass before a false alarm of the monitor: on average, at least so many."
SECONDS = quantity({"ms": 1e-3, "s": 1.0, "": 1.0}, "2ms", least=0.0, most=10.0)


def _name(_: click.Context, __: click.Parameter, text: str) -> str:
    if not re.fullmatch(r"[\w.~-]+", text):
        raise click.BadParameter(f"expected letters, digits, '.', '_', '~' and '-', got {text!r}")
    return text


@click.command()
@click.argument("guard", type=FILE)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", default=8080, type=click.IntRange(0, 65535), help="Port to listen on; 0 takes a free one.")
@click.option("--name", default=Options.name, callback=_name, help="Name in the addresses, /v2/models/NAME.")
@click.option("--key-file", type=FILE, help="Text file of keys, one per line; requests need one of them.")
@click.option("--max-body", default="16MB", callback=size_of, help="Size of the largest request body.")
@click.option("--max-waiting", default=Options.max_waiting, type=COUNT, help="Requests that may wait; others get 503.")
@click.option("--max-batch", default=Options.max_batch, type=COUNT, help="Inputs that are judged together, at most.")
@click.option("--max-delay", default="2ms", callback=SECONDS, help="Longest wait for a fuller batch, under load.")
@click.option("--run-length", default=Options.run_length, help=_LENGTH)
@click.option("--kind", type=KIND, default=Options.kind, help="Watch p-values, or the share of refused inputs.")
@click.option("--state", type=FILE, help="File of the monitor's state; default: GUARD.monitor.json.")
@click.option("--keep-flagged", type=FOLDER, help="Keep a random sample of refused inputs in this folder.")
@click.option("--keep", default=Options.keep, type=click.IntRange(1, 10_000), help="Inputs in that sample, at most.")
@click.option("--quiet", is_flag=True, help="Log no line for each request.")
@seed_option
@model_options
def serve(guard: str, host: str, port: int, key_file: str | None, max_body: int, quiet: bool, **options: Any) -> None:
    """Serve verdicts over HTTP, and watch the inputs for a change.

    GUARD is the file of a calibrated guard. The service speaks the Open Inference Protocol v2 (/v2/models/guard/infer,
    JSON and binary tensors) and plain JSON (POST /predict with a list of rows). Waiting requests are joined into
    batches. GET / is a page for people, /metrics is for Prometheus, /status and /openapi.json are for programs.

    When GUARD's file changes, it is loaded again, and also on SIGHUP; a broken one leaves the old guard in place.
    SIGTERM finishes the requests in flight. The monitor continues after a restart.
    """
    for module in ("orjson", "prometheus_client", "starlette", "uvicorn"):
        import_extra(module, "serve")
    from igeood.serve.app import App
    from igeood.serve.log import json_log
    from igeood.serve.run import listen, read_keys, run
    from igeood.serve.service import Service

    click.get_current_context().with_resource(json_log())
    keys = read_keys(Path(key_file)) if key_file else []
    options |= {name: options[name] and Path(options[name]) for name in ("state", "keep_flagged")}
    named = {name: options.pop(name) for name in ("model", "weights")}
    with listen(host, port, has_keys=bool(keys)) as listener:
        service = Service(Path(guard), load_model(named), Options(**options))
        run(App(service, keys=keys, max_body=max_body, quiet=quiet), service, listener)
