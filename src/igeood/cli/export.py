"""`igeood export`: a guard and its model as one ONNX graph."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from igeood.cli import _shared
from igeood.cli._shared import check_out, load_guard, open_samples, read_arrays
from igeood.terminal import FILE, show

if TYPE_CHECKING:
    from igeood.guard import Guard

_EXAMPLE = "Example inputs: one array in an .npz file, or one for each keyword; or samples as for `igeood score`."


@click.command()
@click.argument("guard", type=FILE)
@click.option("--example", type=click.Path(), help=_EXAMPLE)
@click.option("--out", type=FILE, required=True, help="Write the graph here (.onnx).")
@_shared.guard_options
def export(guard: str, example: str | None, out: str, force: bool, as_json: bool, **options: Any) -> None:
    """Write GUARD and its model as one ONNX graph.

    The graph runs without Python and torch, on any number of samples. Its outputs are logits (with a model), score,
    p_value, is_ood and label. The file is written only after onnxruntime has run the graph on the example and agreed
    with the guard. A guard of logits, or one that was fitted on folders of images, needs no example.
    """
    check_out(out, force, guard, *([example] if example else []), guard=False)
    loaded = load_guard(guard, options)
    inputs = _example(example, loaded, options)
    click.echo("export: tracing the graph and comparing it with the guard", err=True)
    loaded.export(out, inputs)
    size = {"bytes": Path(out).stat().st_size} if as_json else {}
    show(as_json, {"out": out, **size, "threshold": loaded.threshold, "promise": loaded.promise})


def _example(name: str | None, guard: "Guard", options: dict[str, Any]) -> Any:
    """Inputs of the guard from a file or a set of images; of images whose size is known, noise."""
    if name is None and guard.preparation is not None:
        import torch

        size = guard.preparation["size"]
        return torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(0))
    if name is None:
        return None
    if guard.source.model is None or (guard.preparation is not None and not name.endswith(".npz")):
        return open_samples([name], guard, options, lambda *_: None, "example")
    arrays = read_arrays(name, "example")[0]
    return next(iter(arrays.values())) if len(arrays) == 1 else arrays
