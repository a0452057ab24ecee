"""`igeood monitor`: whether the inputs have changed, from verdict files."""

from typing import Any

import click

from igeood.cli._shared import check_out
from igeood.errors import InputError
from igeood.terminal import FILE, SEED, force_option, json_option, progress_bars, show

KIND = click.Choice(["p-values", "flags"])
_LENGTH = "Inputs that pass before a false alarm: on average, at least so many.  [default: 1000000]"
_WATCHED = "Watch the p-values of the scores, or the share of refused inputs.  [default: p-values]"


@click.command()
@click.argument("guard", type=click.Path())
@click.argument("verdicts", metavar="VERDICTS...", nargs=-1, required=True, type=click.Path())
@click.option("--run-length", type=float, help=_LENGTH)
@click.option("--kind", type=KIND, help=_WATCHED)
@click.option("--seed", type=SEED, help="Seed of the numbers that break ties.  [default: 0]")
@click.option("--state", type=FILE, help="Continue from this file if it exists, and write it.")
@click.option("--acknowledge", is_flag=True, help="First forget the alarms that --state remembers.")
@click.option("--picture", type=FILE, help="Draw the evidence: a .png or .svg file.")
@force_option
@json_option
def monitor(guard: str, verdicts: tuple[str, ...], state: str | None, picture: str | None, **options: Any) -> None:
    """Detect a change of the inputs since GUARD was calibrated.

    VERDICTS are files that `igeood score` wrote (Parquet, CSV or JSON lines), folders or patterns of them. Their rows
    are read in order. The guard's model is not needed.

    The result has the evidence of a change and the alarms. An alarm has two inputs, numbered from 0: the one at which
    the evidence reached the run length, and the one at which the change most likely began. Rows that could not be read
    are no evidence. Give each file once: repeated inputs count twice.

    The exit code is 0 with or without an alarm. With --json, `alarm` is true after an alarm, including one from earlier
    files that --state remembers; `new_alarms` counts the alarms in VERDICTS.
    """
    from igeood.cli import _evidence
    from igeood.guard.file import load_calibration
    from igeood.monitor import open_monitor
    from igeood.work.verdicts import watch

    if options["acknowledge"] and state is None:
        raise InputError("needs a state whose alarms it forgets", argument="acknowledge", cure="name it with {state}")
    if picture is not None:
        check_out(picture, options["force"], guard, *verdicts, *filter(None, [state]), guard=False, what="picture")
        _evidence.check_picture(picture)
    if state is not None:
        check_out(state, True, guard, *verdicts, guard=False, what="state")
    chosen = {name: options[name] for name in ("run_length", "kind", "seed") if options[name] is not None}
    watcher = open_monitor(load_calibration(guard), state, chosen)
    if options["acknowledge"]:
        watcher.acknowledge()
    alarms_before = watcher.alarm_count
    trace = _evidence.Trace(watcher.inputs)
    with progress_bars() as report:
        ids = watch(watcher, verdicts, report, trace.add)
    if picture is not None:
        _evidence.draw(watcher, trace, picture)
    if state is not None:
        watcher.save(state)
    record = {name: getattr(watcher, name) for name in ("inputs", "unread", "evidence", "alarm", "since")}
    alarms = [{**one._asdict(), "id": ids.get(one.at), "since_id": ids.get(one.since)} for one in watcher.alarms]
    record |= {"new_alarms": watcher.alarm_count - alarms_before, "alarms": alarms}
    record |= {"warning" if watcher.calibration.trained_on else "promise": watcher.promise}
    record |= {name: getattr(watcher, name) for name in ("run_length", "kind", "seed")}
    if not options["as_json"]:
        record["alarms"] = alarms[:1] or None  # the first
    show(options["as_json"], {**record, "state": state, "picture": picture})
