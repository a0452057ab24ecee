"""`igeood check`: one's own guard on one's own data, with a report."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from igeood.cli import _shared
from igeood.errors import InputError
from igeood.terminal import FILE, named, seed_option, show

if TYPE_CHECKING:
    from igeood.guard import Guard

_DATA = "Held-out samples: a folder of images, an .npz of inputs, logits files, or a table of texts."
_SETS = "OOD samples of the same kind, as NAME=DATA. Repeatable."


@click.command()
@click.argument("guard", type=click.Path())
@click.option("--data", required=True, type=click.Path(), help=_DATA)
@click.option("--ood", metavar="NAME=DATA", multiple=True, callback=named(str), help=_SETS)
@click.option("--out", type=FILE, help="Write the report here (.html).")
@click.option("--verdicts", multiple=True, type=click.Path(), help="Verdict files, for the monitor. Repeatable.")
@click.option("--limit", default=500, type=click.IntRange(min=1), help="Held-out samples to make faults of, at most.")
@click.option("--faults/--no-faults", default=True, help="Try faults, which need the model.")
@click.option("--size", type=click.IntRange(1, 4096), help="Height and width of images, if the guard has none.")
@click.option("--mean", help="Mean of the images' normalisation, with --size: one number, or three with commas.")
@click.option("--std", help="Standard deviation of the images' normalisation, with --size.")
@click.option("--text-column", metavar="NAME", help="Column of texts in a CSV or Parquet file.")
@click.option("--tokenizer", metavar="MODULE:NAME", help="Function that turns a list of texts into the model's inputs.")
@seed_option
@_shared.guard_options
def check(guard: str, data: str, ood: dict[str, str], out: str | None, **options: Any) -> None:
    """Show what GUARD keeps and refuses of your data.

    It keeps a share of the held-out samples, and should refuse OOD samples and faulty inputs, which are made of the
    held-out ones: an image upside down, words in another order. Each fault has the share of inputs that is refused, the
    share whose answer changes, and the share of silent failures: changed, and kept.

    A folder of images may have a sub-folder for each class, named as the guard's classes. An .npz file for a model has
    the inputs as `x`, and perhaps `labels`. The report needs no other file and no network.
    """
    from igeood.checking import check as check_guard

    if options["verdicts"] and out is None:
        raise InputError("are shown in the report", argument="verdicts", cure="give {out=report.html} too")
    read = [guard, data, *ood.values(), *options["verdicts"], *filter(None, [options["weights"]])]
    target = None if out is None else _shared.check_out(out, options["force"], *read, guard=False)
    loaded = _shared.load_guard(guard, options)
    _prepare(loaded, options)
    decode = _decoder(options["tokenizer"])
    sets = {name: _samples(each, loaded, options) for name, each in ood.items()}
    chosen = {"faults": "auto" if options["faults"] else None, "limit": options["limit"], "seed": options["seed"]}
    known = _samples(data, loaded, options, labelled=True)
    result = check_guard(loaded, known, sets or None, decode=decode, **chosen)
    if target is not None:
        result.report(target, verdicts=options["verdicts"])
    if options["as_json"]:
        show(True, {**result.to_dict(), "out": target})
        return
    click.echo(repr(result) if target is None else f"{result!r}\n\nReport: {target}")


def _prepare(guard: "Guard", options: _shared.Options) -> None:
    """Set how images become inputs, if that is said."""
    for name in ("size", "mean", "std", "text_column", "tokenizer"):
        if options[name] is not None and guard.source.model is None:
            raise InputError("is for a guard with a model", argument=name, cure="leave it out")
    if options["size"] is not None:
        from igeood.images import prepare

        prepare(guard, options["size"], options["mean"], options["std"])
    elif options["mean"] is not None or options["std"] is not None:
        raise InputError("needs the images' size too", argument="mean", cure="give {size=32}, for example")


def _samples(name: str, guard: "Guard", options: _shared.Options, *, labelled: bool = False) -> Any:
    """Samples of a set, of the kind that the guard takes."""
    if guard.source.model is None:
        from igeood.work.scoring import open_logits

        return open_logits(guard, [name], _shared.column_names(options), labelled=labelled)
    if options["text_column"] is not None:
        return list(_texts(name, guard, options, labelled=labelled))
    if Path(name).suffix == ".npz":
        arrays, labels = _shared.read_arrays(name, "data" if labelled else "ood", "x")
        if "x" not in arrays:
            raise InputError("no array x", place=name, cure="name the inputs x")
        return arrays["x"] if labels is None or not labelled else (arrays["x"], labels)
    import torch

    from igeood.images import PREFIX, ImageFolder

    folder = ImageFolder(name, guard, batch=options["batch"], training=False)
    folder.on_error = "refuse"
    root = name.removeprefix(PREFIX)
    parts = [path.relative_to(root).parts for path in folder.paths] if labelled else []
    names = [part[0] for part in parts] if all(len(part) > 1 for part in parts) else []
    found = sorted({*names})
    classes = list(guard.classes or (found if len(found) == guard.detector.n_classes_ else ()))
    if names and {*names} <= {*classes}:
        folder.labels = torch.tensor([classes.index(one) for one in names])
    elif labelled:
        click.echo(f"{name}: its sub-folders are not the guard's classes, so there are no labels", err=True)
    return folder


def _texts(name: str, guard: "Guard", options: _shared.Options, *, labelled: bool) -> Iterator[dict[str, Any]]:
    """Batches of what the tokenizer makes of texts."""
    import pyarrow as pa
    import torch

    from igeood.outputs import class_numbers
    from igeood.tables import check_columns, open_table

    tokenize = _function(options["tokenizer"])
    column, label = options["text_column"], options["label_column"] or "label"
    with open_table(Path(name)) as table:
        check_columns(table, [column])
        types = {column: pa.string()} | ({label: pa.string()} if labelled and label in table.names else {})
        for block in table.batches(types):
            for start in range(0, len(block), options["batch"]):
                part = block.slice(start, options["batch"])
                batch = dict(tokenize(part[column].cast(pa.string()).to_pylist()))
                if label in types and guard.classes is not None:
                    numbers = class_numbers(part[label].to_pylist(), guard.classes)
                    batch["labels"] = torch.as_tensor(numbers)
                yield batch


def _function(spec: str | None) -> Callable[..., Any]:
    if spec is None:
        raise InputError("texts need one", argument="tokenizer", cure="give {tokenizer=MODULE:NAME}")
    from igeood.model.factory import resolved

    function = resolved(spec, "tokenizer")
    if not callable(function):
        raise InputError(f"{spec} is {type(function).__name__}, no function", argument="tokenizer")
    return cast("Callable[..., Any]", function)


def _decoder(spec: str | None) -> Callable[..., str] | None:
    """What the tokenizer makes of tokens, if it can."""
    tokenize = None if spec is None else _function(spec)
    decode = getattr(tokenize, "decode", None)
    return decode if callable(decode) else None
