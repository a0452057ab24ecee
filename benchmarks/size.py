"""How large the house is: code lines (docstrings, comments and blanks apart) beside the aims, and long functions."""

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

LIMITS = {"core": 4500, "bench": 3000, "tests": 10_000}
LONGEST = 50
_PASSED_OVER = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(text: str) -> int:
    """Lines with code on them."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _PASSED_OVER:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def long_functions(path: Path) -> list[str]:
    """Functions of more than 50 lines, their docstrings apart."""
    long = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            if lines > LONGEST:
                long.append(f"{path}:{node.lineno} {node.name} ({lines})")
    return long


def main() -> None:
    """Print the sizes; exit with 1 where one is over its limit."""
    command = ["git", "ls-files", "*.py"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()  # noqa: S603
    files = [Path(name) for name in listed if Path(name).exists()]
    sizes, rooms = dict.fromkeys(LIMITS, 0), dict[str, int]()
    long = []
    for path in files:
        if path.parts[0] == "src":
            lines = code_lines(path.read_text())
            part = "bench" if path.parts[2] == "bench" else "core"
            room = "/".join(path.parts[2 : 4 if part == "bench" else 3])
            sizes[part], rooms[room] = sizes[part] + lines, rooms.get(room, 0) + lines
            long += long_functions(path)
        elif path.parts[0] == "tests":
            sizes["tests"] += path.read_text().count("\n")
    for room, lines in sorted(rooms.items(), key=lambda pair: -pair[1]):
        print(f"{lines:7,}  {room}")
    for part, lines in sizes.items():
        print(f"{part}: {lines:,} lines, at most {LIMITS[part]:,}{'' if lines <= LIMITS[part] else ': OVER'}")
    print("\n".join(f"over {LONGEST} lines: {name}" for name in long) or f"no function over {LONGEST} lines")
    sys.exit(bool(long) or any(sizes[part] > LIMITS[part] for part in LIMITS))


if __name__ == "__main__":
    main()
