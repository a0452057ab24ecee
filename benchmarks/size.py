"""How large the house is: code lines (docstrings, comments and blanks apart) beside the aims, and what hides them."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

LIMITS = {"core": 6600, "bench": 4300, "tests": 11_500}
LONGEST_FUNCTION = 50
LONGEST_FILE = 400
MOST_PACKED = 2  # targets of a tuple display
_FORMATTER_OFF = re.compile(r"#\s*fmt:\s*(skip|off)\b")
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(text: str) -> int:
    """Lines with code on them."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def long_functions(text: str) -> list[int]:
    """First lines of functions of more than 50 lines, their docstrings apart."""
    long = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            if lines > LONGEST_FUNCTION:
                long.append(node.lineno)
    return long


def packed_assignments(text: str) -> list[int]:
    """Lines that assign a tuple display to three targets or more."""
    assigned = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assign)]
    displays = [node for node in assigned if isinstance(node.value, ast.Tuple)]
    tuples = [(node, target) for node in displays for target in node.targets if isinstance(target, ast.Tuple)]
    return [node.lineno for node, target in tuples if len(target.elts) > MOST_PACKED]


def unformatted(text: str) -> list[int]:
    """Lines that tell the formatter to keep off."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [t.start[0] for t in tokens if t.type == tokenize.COMMENT and _FORMATTER_OFF.match(t.string)]


def faults(path: Path, text: str) -> list[str]:
    """What is wrong with a file of the source."""
    found = {
        f"function over {LONGEST_FUNCTION} lines": long_functions(text),
        f"file over {LONGEST_FILE} lines": [1] if text.count("\n") > LONGEST_FILE else [],
        f"more than {MOST_PACKED} targets of a tuple": packed_assignments(text),
        "formatter off": unformatted(text),
    }
    return [f"{path}:{line} {what}" for what, lines in found.items() for line in lines]


def main() -> None:
    """Print the sizes; exit with 1 where one is over its limit, or a file has a fault."""
    command = ["git", "ls-files", "*.py"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()  # noqa: S603
    sizes = dict.fromkeys(LIMITS, 0)
    rooms: dict[str, int] = {}
    wrong: list[str] = []
    for path in (Path(name) for name in listed if Path(name).exists()):
        text = path.read_text()
        if path.parts[0] == "src":
            part = "bench" if path.parts[2] == "bench" else "core"
            room = "/".join(path.parts[2 : 4 if part == "bench" else 3])
            lines = code_lines(text)
            sizes[part] += lines
            rooms[room] = rooms.get(room, 0) + lines
            wrong += faults(path, text)
        elif path.parts[0] == "tests":
            sizes["tests"] += text.count("\n")
    for room, lines in sorted(rooms.items(), key=lambda pair: -pair[1]):
        print(f"{lines:7,}  {room}")
    for part, lines in sizes.items():
        print(f"{part}: {lines:,} lines, at most {LIMITS[part]:,}{'' if lines <= LIMITS[part] else ': OVER'}")
    print("\n".join(wrong) or "no fault in the source")
    sys.exit(bool(wrong) or any(sizes[part] > LIMITS[part] for part in LIMITS))


if __name__ == "__main__":
    main()
