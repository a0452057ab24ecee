"""`igeood monitor`: whether the inputs have changed, from verdict files."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from igeood.cli._shared import check_out
from igeood.errors import InputError
from igeood.terminal import FILE, force_option, json_option, progress_bars, show

if TYPE_CHECKING:
    from igeood.monitor import Alarm, Monitor

KIND = click.Choice(["p-values", "flags"])
SHOWN = 3  # alarms
_LENGTH = "Minimum mean number of inputs before a false alarm.  [default: 1000000]"
_WATCHED = "Watch the scores' p-values, or how many are refused.  [default: p-values]"


@click.command()
@click.argument("guard", type=click.Path())
@click.argument("verdicts", metavar="VERDICTS...", nargs=-1, required=True, type=click.Path())
@click.option("--run-length", type=float, help=_LENGTH)
@click.option("--kind", type=KIND, help=_WATCHED)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Seed of the numbers that break ties.  [default: 0]")
@click.option("--state", type=FILE, help="Go on from this file if it is there, and write it.")
@click.option("--acknowledge", is_flag=True, help="Forget the alarms in --state first.")
@click.option("--picture", type=FILE, help="Draw the evidence: a .png or .svg file.")
@force_option
@json_option
def monitor(
    guard: str,
    verdicts: tuple[str, ...],
    state: str | None,
    acknowledge: bool,
    picture: str | None,
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Tell whether inputs have changed since GUARD was calibrated, from its VERDICTS in the order of their rows.

    VERDICTS are files that `igeood score` wrote (Parquet, CSV or JSON lines), folders or patterns of them. The guard's
    model is not needed.

    The evidence of a change is printed, and each alarm: the input at which the evidence reached the run length, and the
    one at which the change most likely began. Inputs are numbered from 0. Rows that could not be read are no evidence.
    Give each file once: inputs that come twice count twice.

    The exit code is 0 with or without an alarm. In the answer of --json, `alarm` is true after an alarm, also one of
    earlier files that --state remembers; `new_alarms` counts those in VERDICTS.
    """
    from igeood.cli import _evidence
    from igeood.guard.file import load_calibration
    from igeood.work.verdicts import watch

    if acknowledge and state is None:
        raise InputError("forgets the alarms of a state", argument="acknowledge", cure="name it with {state}")
    inputs = (guard, *verdicts)
    if picture is not None:
        check_out(picture, force, *inputs, *filter(None, [state]), guard=False, what="picture")
        _evidence.check_picture(picture)
    if state is not None:
        check_out(state, True, *inputs, guard=False, what="state")
    watcher = _open(load_calibration(guard), state, options)
    if acknowledge:
        watcher.acknowledge()
    alarms_before = watcher.alarm_count
    trace = _evidence.Trace(watcher.inputs)
    with progress_bars() as report:
        names = watch(watcher, verdicts, report, trace.add)
    if picture is not None:
        _evidence.draw(watcher, trace, picture)
    if state is not None:
        watcher.save(state)
    counts = {"inputs": watcher.inputs, "unread": watcher.unread, "evidence": watcher.evidence}
    promise = "warning" if watcher.calibration.trained_on else "promise"
    record = {
        **counts,
        **_alarms(watcher, watcher.alarm_count - alarms_before, names, as_json),
        promise: watcher.promise,
    }
    show(as_json, {**record, "state": state, "picture": picture})


def _open(calibration: Any, state: str | None, options: dict[str, Any]) -> "Monitor":
    """A monitor with these options, where they are given; one that goes on must have them."""
    from igeood.monitor import Monitor

    chosen = {name: value for name, value in options.items() if value is not None}
    if state is None or not Path(state).exists():
        return Monitor(calibration, **chosen)
    watcher = Monitor.load(state, calibration)
    for name, value in chosen.items():
        before = getattr(watcher, name)
        if before != value:
            cure = "leave it out, or name another {state}"
            raise InputError(f"{state} has {before}, not {value}", argument=name, cure=cure)
    return watcher


def _alarms(watcher: "Monitor", new: int, names: dict[int, Any], as_json: bool) -> dict[str, Any]:
    """The alarms: for programs, or in a line each."""
    if as_json:
        places = [
            {**alarm._asdict(), "id": names.get(alarm.at), "since_id": names.get(alarm.since)}
            for alarm in watcher.alarms
        ]
        about = {"alarm": watcher.alarm, "since": watcher.since, "new_alarms": new, "alarms": places}
        return {**about, "run_length": watcher.run_length, "kind": watcher.kind, "seed": watcher.seed}
    count = f"{max(new, len(watcher.alarms)):,}" if watcher.alarms else "none"
    lines = {f"alarm {number}": _line(alarm, names) for number, alarm in enumerate(watcher.alarms[:SHOWN], 1)}
    more = {"more alarms": len(watcher.alarms) - SHOWN} if len(watcher.alarms) > SHOWN else {}
    return {"alarms": count, **lines, **more}


def _line(alarm: "Alarm", names: dict[int, Any]) -> str:
    ids = {number: f" ({name})" for number, name in names.items() if str(name) != str(number)}
    at, since = (f"input {number:,}{ids.get(number, '')}" for number in (alarm.at, alarm.since))
    return f"at {at}, evidence {alarm.evidence:,.0f}; changed since about {since}"
