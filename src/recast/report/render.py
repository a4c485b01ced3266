"""A table of the report, and its forms in Markdown, LaTeX, HTML and CSV."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field
from html import escape

__all__ = ["Cell", "Table", "comma_separated", "html", "latex", "markdown"]

_LATEX = {"&": r"\&", "%": r"\%", "_": r"\_", "#": r"\#", "$": r"\$", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}"}
_SIGNS = {"≻": r"$\succ$", "λ": r"$\lambda$", "±": r"$\pm$", "−": "$-$", "é": r"\'e", "×": r"$\times$", "≤": r"$\leq$"}


@dataclass(frozen=True)
class Cell:
    """A text, its standard deviation if it has one, and whether it is bold."""

    text: str
    spread: str = ""
    bold: bool = False


@dataclass(frozen=True)
class Table:
    """File name, title, column names, rows of cells, and notes below the table."""

    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = field(default=())


def markdown(table: Table) -> str:
    """A pipe table below its title, followed by the notes."""

    def shown(cell: Cell) -> str:
        text = cell.text.replace("|", r"\|")
        return (f"**{text}**" if cell.bold else text) + (f" ± {cell.spread}" if cell.spread else "")

    lines = [f"### {table.title}", "", "| " + " | ".join(table.header) + " |"]
    lines.append("|---" + "|---:" * (len(table.header) - 1) + "|")
    lines += ["| " + " | ".join(map(shown, row)) + " |" for row in table.rows]
    return "\n".join([*lines, *(["", *table.notes] if table.notes else [])]) + "\n"


def latex(table: Table) -> str:
    """A booktabs table with standard deviations as subscripts."""

    def shown(cell: Cell) -> str:
        text = _escape(cell.text)
        return (rf"\textbf{{{text}}}" if cell.bold else text) + (rf"$_{{\pm{cell.spread}}}$" if cell.spread else "")

    caption = " ".join([f"{table.title}.", *table.notes])
    lines = [r"\begin{table}[!htbp]", r"\centering", r"\small", rf"\caption{{{_escape(caption)}}}"]
    lines += [
        rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{@{{}}l{'c' * (len(table.header) - 1)}@{{}}}}",
        r"\toprule",
    ]
    lines += [" & ".join(map(_escape, table.header)) + r" \\", r"\midrule"]
    lines += [" & ".join(map(shown, row)) + r" \\" for row in table.rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def html(table: Table) -> str:
    """A section with a title, a table and the notes; text is escaped."""

    def shown(cell: Cell) -> str:
        text = escape(cell.text)
        spread = f"<small> ±{escape(cell.spread)}</small>" if cell.spread else ""
        return f"<td>{f'<b>{text}</b>' if cell.bold else text}{spread}</td>"

    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in table.header)
    body = "".join(f"<tr>{''.join(map(shown, row))}</tr>" for row in table.rows)
    notes = "".join(f"<p class=note>{escape(note)}</p>" for note in table.notes)
    grid = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<section><h3>{escape(table.title)}</h3><div class=scroll>{grid}</div>{notes}</section>"


def _escape(text: str) -> str:
    return "".join(_LATEX.get(letter) or _SIGNS.get(letter, letter) for letter in text)


def comma_separated(table: Table) -> str:
    """CSV with standard deviations in separate columns, for further computation."""
    spreads = [any(row[k].spread for row in table.rows) for k in range(len(table.header))]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    names = zip(table.header, spreads, strict=True)
    writer.writerow([each for name, spread in names for each in ((name, f"{name} std") if spread else (name,))])
    for row in table.rows:
        cells = zip(row, spreads, strict=True)
        writer.writerow([each for cell, two in cells for each in ((cell.text, cell.spread) if two else (cell.text,))])
    return file.getvalue()
