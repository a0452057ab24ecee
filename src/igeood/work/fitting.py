"""Summaries of training files, for guards that options describe."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from igeood import guard as guards
from igeood.detectors import METHODS
from igeood.guard import Guard, summarise
from igeood.work.scoring import open_logits

BUILD = ("method", "temperature", "probabilities", "layers")


def build(model: nn.Module | None, options: Mapping[str, Any]) -> Guard:
    """The guard that the options `access`, those in `BUILD`, and the method's own `options` describe."""
    access = options["access"]
    chosen = {name: options[name] for name in BUILD if options[name] is not None}
    if access is None:
        method = METHODS.get(chosen.get("method", "evidence"))
        has_layers = model is not None or "layers" in chosen
        is_white = method is not None and (method.needs_layers or (method.needs.reads_layers and has_layers))
        access = "white-box" if is_white else "black-box"
    builder = getattr(guards, access.replace("-", "_"))
    guard: Guard = builder(model, **chosen)
    return guard.with_options(**options["options"]) if options["options"] else guard


def summarise_file(options: Mapping[str, Any], columns: Mapping[str, Any], budget: int, name: str, out: str) -> int:
    """Write the summary of one logits file for the guard that options describe; return its rows."""
    guard = build(None, options)
    file = replace(open_logits(guard, [name], {}, labelled=True), **columns)
    summary = summarise(guard, file, classes=options["classes"], budget=budget)
    summary.save(out)
    return summary.rows
