r"""Formulas of pages and docstrings as MathML, converted when the site is built: no script, no request.

In pages ``$…$`` is a formula in a line, and a block fenced as ``math`` is displayed; docstrings use ``:math:`` and
``.. math::``.
"""

import html
import re

from latex2mathml.converter import convert


def mathml(tex: str, display: str = "inline") -> str:
    """One formula as a `math` element. An unknown command is an error; latex2mathml would print it as it stands."""
    formula = convert(tex.replace(r"\arg", r"\operatorname{arg}"), display=display)
    if "\\" in formula:
        raise ValueError(f"latex2mathml does not know a command of the formula {tex}")
    return formula


def on_page_markdown(markdown: str, **_: object) -> str:
    """Convert the formulas of a page; code is left alone."""
    markdown = re.sub(r"^```math\n(.*?)^```$", lambda m: block(m[1]), markdown, flags=re.DOTALL | re.MULTILINE)
    parts = re.split(r"(^```.*?^```|`[^`\n]+`)", markdown, flags=re.DOTALL | re.MULTILINE)
    formula = re.compile(r"\$(?=\S)([^$\n]+)(?<=\S)\$(?!\w)")  # not the $A of "$A and $B"
    return "".join(p if p.startswith("`") else formula.sub(lambda m: in_line(m[1]), p) for p in parts)


def on_page_content(content: str, **_: object) -> str:
    """Convert the formulas of docstrings, which are HTML by now."""
    content = re.sub(r":math:<code[^>]*>(.*?)</code>", lambda m: mathml(plain(m[1])), content, flags=re.DOTALL)
    return re.sub(r"<p>\.\. math:: (.*?)</p>", lambda m: block(plain(m[1])), content, flags=re.DOTALL)


def in_line(tex: str) -> str:
    """A formula in a line. At a line's start Markdown takes a `math` element for a block, but not a `span`."""
    return f"<span>{mathml(tex)}</span>"


def block(tex: str) -> str:
    """A formula on a line of its own."""
    return f'<div class="formula">{mathml(tex.strip(), "block")}</div>'


def plain(fragment: str) -> str:
    """Text of an HTML fragment."""
    return html.unescape(re.sub(r"<[^>]+>", "", fragment))
