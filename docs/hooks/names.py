"""Parameters that share an entry of a docstring, one by one: each then shows its own type and default."""

import re
from typing import Any

import griffe

SECTION = re.compile(r"(?<=^Parameters\n----------\n).*?(?=^\w+\n-{3,}\n|\Z)", re.DOTALL | re.MULTILINE)
ENTRY = re.compile(r"^(?P<names>\w+(?:, \w+)+)(?P<kind> : .*)?\n(?P<text>(?:[ ]+\S.*(?:\n|\Z))+)", re.MULTILINE)


class OneByOne(griffe.Extension):
    """Writes such entries out before they are read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Split the entries of one object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = SECTION.sub(lambda part: ENTRY.sub(split, part[0]), obj.docstring.value)


def split(entry: re.Match[str]) -> str:
    """One entry for each name, with the same text."""
    return (
        "\n".join(f"{name}{entry['kind'] or ''}\n{entry['text'].rstrip()}" for name in entry["names"].split(", "))
        + "\n"
    )
