"""`igeood serve`: a guard behind HTTP."""

import re
from pathlib import Path
from typing import Any

import click

from igeood.cli._shared import load_model, model_options, size_of
from igeood.errors import MissingExtraError
from igeood.terminal import FILE, FOLDER, seed_option

KIND = click.Choice(["p-values", "flags"])
COUNT = click.IntRange(min=1)


def _seconds(_: click.Context, __: click.Parameter, text: str) -> float:
    """Seconds from text such as 2ms or 0.1s."""
    number, unit = (text[:-2], 1e-3) if text.endswith("ms") else (text.removesuffix("s"), 1.0)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 10:
        raise click.BadParameter(f"expected a time up to 10s, such as 2ms, got {text!r}")
    return seconds


def _name(_: click.Context, __: click.Parameter, text: str) -> str:
    if not re.fullmatch(r"[\w.~-]+", text):
        raise click.BadParameter(f"expected letters, digits, '.', '_', '~' and '-', got {text!r}")
    return text


@click.command()
@click.argument("guard", type=FILE)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8080, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free port.")
@click.option("--name", default="guard", show_default=True, callback=_name, help="Name of the model in addresses.")
@click.option("--key-file", type=FILE, help="Text file of keys, one per line; requests need one of them.")
@click.option("--max-body", default="16MB", show_default=True, callback=size_of, help="Largest request.")
@click.option("--max-waiting", default=256, show_default=True, type=COUNT, help="Longest queue; then requests get 503.")
@click.option("--max-batch", default=64, show_default=True, type=COUNT, help="Largest batch of inputs.")
@click.option("--max-delay", default="2ms", show_default=True, callback=_seconds, help="Maximum delay under load.")
@click.option("--run-length", default=1_000_000.0, show_default=True, help="Mean number of inputs to a false alarm.")
@click.option("--kind", type=KIND, default="p-values", show_default=True, help="What the monitor watches.")
@click.option("--state", type=FILE, help="File of the monitor's state; default: GUARD.monitor.json.")
@click.option("--keep-flagged", type=FOLDER, help="Keep a sample of refused inputs in this folder.")
@click.option("--keep", default=100, show_default=True, type=click.IntRange(1, 10_000), help="Size of that sample.")
@click.option("--quiet", is_flag=True, help="Log no line for each request.")
@seed_option
@model_options
def serve(guard: str, host: str, port: int, key_file: str | None, max_body: int, quiet: bool, **options: Any) -> None:
    """Serve verdicts over HTTP, and watch the inputs for a change.

    GUARD is the file of a calibrated guard. The service speaks the Open Inference Protocol v2 (/v2/models/guard/infer,
    JSON and binary tensors) and plain JSON (POST /predict with a list of rows). Waiting requests are joined into
    batches. GET / is a page for people, /metrics is for Prometheus, /status and /openapi.json are for programs.

    A changed guard file is loaded again, also on SIGHUP; a broken one leaves the old guard in place. SIGTERM finishes
    the requests in flight. The monitor continues after a restart.
    """
    try:
        from igeood.serve.app import App
        from igeood.serve.log import json_log
        from igeood.serve.run import listen, read_keys, run
        from igeood.serve.service import Options, Service
    except ImportError as error:
        raise MissingExtraError(f"{error.name} is needed", cure="pip install 'igeood[serve]'") from error
    click.get_current_context().with_resource(json_log())
    keys = read_keys(Path(key_file)) if key_file else []
    options |= {name: options[name] and Path(options[name]) for name in ("state", "keep_flagged")}
    named = {name: options.pop(name) for name in ("model", "weights")}
    with listen(host, port, has_keys=bool(keys)) as listener:
        service = Service(Path(guard), load_model(named), Options(**options))
        run(App(service, keys=keys, max_body=max_body, quiet=quiet), service, listener)
