r"""Formulas of pages and docstrings as MathML, made when the site is built: no script, no request.

In pages ``$…$`` is a formula in a line and a block fenced as ``math`` one of its own; in docstrings it is ``:math:`…```
and ``.. math::``. The TeX is the little that this project uses; anything else is an error.
"""

import html
import re

LETTERS = {
    "alpha": "α", "delta": "δ", "Delta": "Δ", "varepsilon": "ε", "ell": "ℓ", "lambda": "λ", "mu": "μ", "rho": "ρ",
    "sigma": "σ", "Sigma": "Σ", "pi": "π", "theta": "θ", "infty": "∞",
}  # fmt: skip
OPERATORS = {
    "sum": "∑", "nabla": "∇", "top": "⊤", "le": "≤", "ge": "≥", "in": "∈", "cdot": "·", "to": "→", "approx": "≈",
    "lceil": "⌈", "rceil": "⌉", "times": "×", "{": "{", "}": "}", "#": "#", "|": "‖",
}  # fmt: skip
ARGUMENTS = {"frac": 2, "sqrt": 1}
ACCENTS = {"tilde": "~", "hat": "^"}
NAMES = ("arccos", "log", "exp", "min", "max", "arg", "sin", "cos")
WITH_LIMITS = {"min", "max", "∑"}
SPACE = '<mspace width="0.17em"/>'
TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|\d+(?:[.,]\d+)*|\S")


def mathml(tex: str, *, display: bool = False) -> str:
    """One formula as a `math` element."""
    parser = _Parser(TOKEN.findall(tex), tex)
    return f'<math display="{"block" if display else "inline"}"><mrow>{parser.row(None)}</mrow></math>'


class _Parser:
    """Reads tokens from left to right; each method gives the MathML of what it has read."""

    def __init__(self, tokens: list[str], tex: str) -> None:
        self.tokens, self.tex = tokens[::-1], tex

    def row(self, end: str | None) -> str:
        """Everything up to `end`."""
        parts = []
        while self.tokens and self.tokens[-1] != end:
            parts.append(self.scripted())
        if end is not None:
            self.take()
        return "".join(parts)

    def take(self) -> str:
        """The next token."""
        if not self.tokens:
            raise ValueError(f"formula ends too early: {self.tex}")
        return self.tokens.pop()

    def raw(self) -> str:
        """The letters of a group in braces."""
        if self.take() != "{":
            raise ValueError(f"expected a brace: {self.tex}")
        parts = []
        while (item := self.take()) != "}":
            parts.append(item)
        return html.escape("".join(parts))

    def scripted(self) -> str:
        """An atom with what is below and above it."""
        base = self.atom()
        below = above = ""
        while self.tokens and self.tokens[-1] in ("_", "^", "'"):
            mark = self.take()
            if mark == "'":
                base = f"<mrow>{base}<mo>′</mo></mrow>"
            elif mark == "_":
                below = self.atom()
            else:
                above = self.atom()
        kind = "under", "over"
        if not any(base == f'<mo movablelimits="true">{name}</mo>' for name in WITH_LIMITS):
            kind = "sub", "sup"
        if below and above:
            return f"<m{kind[0]}{kind[1]}>{base}{below}{above}</m{kind[0]}{kind[1]}>"
        if below:
            return f"<m{kind[0]}>{base}{below}</m{kind[0]}>"
        return f"<m{kind[1]}>{base}{above}</m{kind[1]}>" if above else base

    def atom(self) -> str:
        """One element: a letter, a number, a sign, a command with its arguments, or a group in braces."""
        item = self.take()
        if item.startswith("\\"):
            return self.command(item[1:])
        if item[0].isdigit():
            return f"<mn>{item}</mn>"
        if item.isalpha():
            return f"<mi>{item}</mi>"
        if item in "()[]|":
            return f'<mo stretchy="false">{item}</mo>'
        return f"<mrow>{self.row('}')}</mrow>" if item == "{" else f"<mo>{html.escape(item).replace('-', '−')}</mo>"

    def command(self, name: str) -> str:
        """What follows a backslash."""
        if name in ARGUMENTS:
            return f"<m{name}>{''.join(self.atom() for _ in range(ARGUMENTS[name]))}</m{name}>"
        if name in ACCENTS:
            return f"<mover>{self.atom()}<mo>{ACCENTS[name]}</mo></mover>"
        if name in ("mathrm", "operatorname"):
            return f'<mi mathvariant="normal">{self.raw()}</mi>' + (SPACE if name == "operatorname" else "")
        return sign(name, self.tex)


def sign(name: str, tex: str) -> str:
    """A command without arguments: a letter, an operator, a function's name, a space."""
    if name == ",":
        return SPACE
    if name in LETTERS:
        return f"<mi>{LETTERS[name]}</mi>"
    if name not in NAMES and name not in OPERATORS:
        raise ValueError(f"no such command in formulas.py: \\{name} in {tex}")
    text = OPERATORS.get(name, name)
    limits = ' movablelimits="true"' if text in WITH_LIMITS else ""
    return f"<mo{limits}>{text}</mo>" + (SPACE if name in NAMES and not limits else "")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Formulas that a page's author wrote; code is left alone."""
    markdown = re.sub(r"^```math\n(.*?)^```$", lambda m: block(m[1]), markdown, flags=re.DOTALL | re.MULTILINE)
    parts = re.split(r"(^```.*?^```|`[^`\n]+`)", markdown, flags=re.DOTALL | re.MULTILINE)
    formula = re.compile(r"\$(?=\S)([^$\n]+)(?<=\S)\$(?!\w)")  # not the $A of "$A and $B"
    return "".join(p if p.startswith("`") else formula.sub(lambda m: mathml(m[1]), p) for p in parts)


def on_page_content(content: str, **_: object) -> str:
    """Formulas of docstrings, which are HTML by now."""
    content = re.sub(r":math:<code[^>]*>(.*?)</code>", lambda m: mathml(plain(m[1])), content, flags=re.DOTALL)
    return re.sub(r"<p>\.\. math:: (.*?)</p>", lambda m: block(plain(m[1])), content, flags=re.DOTALL)


def block(tex: str) -> str:
    """A formula on a line of its own."""
    return f'<div class="formula">{mathml(tex, display=True)}</div>'


def plain(fragment: str) -> str:
    """Text of an HTML fragment."""
    return html.unescape(re.sub(r"<[^>]+>", "", fragment))
