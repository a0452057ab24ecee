"""What a clear message is: it names the argument, the place and the cure, in one line."""

import re

from igeood.errors import IgeoodError

LONGEST = 400
# a clause that tells what to do begins with one of these
DO = re.compile(
    r"(add|build|calibrate|call|check|choose|clip|convert|cut|declare|delete|divide|download|drop|encode|expand|fill|fit"
    r"|flatten|free|give|install|keep|leave|load|look|make|mask|move|name|number|pass|pick|put|read|remove|renormalise"
    r"|rename|reshape|run|save|say|scale|select|set|split|squeeze|start|take|try|tune|unpack|update|upgrade|use|wait"
    r"|write) (?!of\b|is\b|has\b|was\b)"
)
# or says what would be right
RIGHT = re.compile(
    r"\bat least (\d|one\b)|\b(is|are) needed\b|\bdid you mean\b|\bthere are\b|\bmust (be|lie|have|agree)\b"
    r"|\bit takes\b|\bbecomes? \w+ by\b|\ba single sample is\b"
)


def cure(text: str) -> str | None:
    """The clause that says what to do, or what would be right; None where there is none. "Expected" alone is none."""
    clauses = [clause.strip() for clause in re.split(r"[;:,.]\s|\bor\b|\band\b|\bthen\b", text)[1:]]
    told = [clause for clause in clauses if DO.match(clause) or RIGHT.search(clause)]
    return told[0] if told else None


def check(error: BaseException | str, *, argument: str, place: str = "") -> None:
    """Assert that an error, or a line of the command line, is clear.

    Parameters
    ----------
    error : exception or str
        An exception must be one of the library's own.
    argument : str
        What the message begins with, before a colon: `logits`, `features['early']`.
    place : str
        Regular expression for where in it the fault is: a row, a position, a shape, a type.
    """
    if isinstance(error, BaseException):
        assert isinstance(error, IgeoodError), f"not the library's own: {type(error).__name__}: {error}"
    text = str(error).strip()
    assert text.startswith(f"{argument}: "), f"does not begin with {argument!r}: {text}"
    assert "\n" not in text, f"more than a line: {text}"
    assert "Traceback" not in text
    assert len(text) <= LONGEST, f"{len(text)} characters: {text}"
    rest = text.removeprefix(f"{argument}: ")
    assert re.search(place, rest), f"does not tell the place, {place!r}: {text}"
    assert cure(text), f"offers no cure: {text}"
