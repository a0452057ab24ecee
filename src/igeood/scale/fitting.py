"""Summaries of training files, for guards that options describe."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

from torch import nn

from igeood import guard as guards
from igeood.detectors import METHODS
from igeood.errors import InputError
from igeood.guard import Guard, summarise
from igeood.scale.scoring import Columns, open_logits

BUILD = ("method", "temperature", "probabilities", "layers")


def build(model: nn.Module | None, given: Mapping[str, Any]) -> Guard:
    """The guard that the options `access`, those in `BUILD`, and the method's own `options` describe."""
    access, options = given["access"], {name: given[name] for name in BUILD if given[name] is not None}
    if access is None:
        method = METHODS.get(options.get("method", ""))
        needs_layers = method.needs_layers if method else model is not None or "layers" in options
        access = "white-box" if needs_layers else "black-box"
    make = getattr(guards, access.replace("-", "_"))
    for name in options.keys() - signature(make).parameters:
        raise InputError(f"{name}: a {access} guard has no such option; leave it out, or choose another --access")
    made: Guard = make(model, **options)
    return made.with_options(**given["options"]) if given["options"] else made


def summarise_file(given: Mapping[str, Any], columns: Columns, budget: int, name: str, out: str) -> int:
    """Write the summary of one logits file for the guard that options describe; return its rows."""
    guard = build(None, given)
    summary = summarise(guard, open_logits(guard, [name], columns, labelled=True), budget=budget)
    summary.save(out)
    return summary.rows
