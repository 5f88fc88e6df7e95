"""A small document: headings, paragraphs, lists, tables, figures, notes, code and folds. It knows nothing about runs.

`to_markdown` writes it as Markdown; `to_html`, in evaluation/html.py, as one HTML file that needs nothing else. All
text is plain text: names that somebody else has chosen are escaped by both, wherever they stand.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias
from urllib.parse import quote

Tone = Literal["plain", "good", "bad", "unsure", "muted"]
_SPECIAL = re.compile(r"([\\`*\[\]<>|~])")
_EMPHASIS = re.compile(r"(?<!\w)_|_(?!\w)")  # within a word an underscore is a letter
_ENTITY = re.compile(r"&(?=#?\w+;)")
_LINE_START = re.compile(r"^(\s*)([#+-]|=+\s*$|\d+(?=[.)]))")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What stands in one cell of a table.

    Attributes:
        text: plain.
        tone: whether it is good news, bad news, unsure or of little weight.
        is_code: whether it is a key, a path or a command.
    """

    text: str
    tone: Tone = "plain"
    is_code: bool = False


@dataclass(frozen=True, kw_only=True)
class Heading:
    """Starts a section; those of level 2 are listed at the top of the HTML file."""

    text: str
    level: int = 2


@dataclass(frozen=True, kw_only=True)
class Paragraph:
    """Plain text."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Bullets:
    """A list of plain texts."""

    items: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under their columns.

    Attributes:
        columns: heads.
        rows: as many cells each as there are columns; the first cell names the row.
        caption: what it shows, or nothing.
        is_stacked: whether a narrow screen shows each row as a card, for cells with sentences in them; else the table
            scrolls sideways by itself.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    caption: str = ""
    is_stacked: bool = False

    def __post_init__(self) -> None:
        """Refuse a row of another width than the heads."""
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of this table must have {len(self.columns)} cells, got {len(row)}: {row}")


@dataclass(frozen=True, kw_only=True)
class Picture:
    """An image that is part of the document.

    Attributes:
        image: bytes of a PNG or SVG.
        alt: what it shows, for whoever does not see it.
        caption: stands below it.
        path: where Markdown finds it, relative to the document; without it, Markdown has the description alone.
        dark_image: the same for a dark background; without it, ``image`` stands on a white card.
        is_wide: whether it is too wide for a narrow screen, which then scrolls it sideways.
    """

    image: bytes = field(repr=False)
    alt: str
    caption: str = ""
    path: str = ""
    dark_image: bytes | None = field(default=None, repr=False)
    is_wide: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """Pictures side by side where there is room, else one below the other."""

    pictures: Sequence[Picture]


@dataclass(frozen=True, kw_only=True)
class Note:
    """A text set apart: a remark, or a warning."""

    text: str
    kind: Literal["note", "warning"] = "note"


@dataclass(frozen=True, kw_only=True)
class Code:
    """Lines to be read or copied as they are."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Fold:
    """Blocks that are opened by their title: what few readers need."""

    title: str
    blocks: Sequence["Block"]


Block: TypeAlias = Heading | Paragraph | Bullets | Table | Picture | Row | Note | Code | Fold


@dataclass(frozen=True, kw_only=True)
class Document:
    """A titled sequence of blocks.

    Example: ``Document(title="Runs", blocks=[Heading(text="Scores"), Table(columns=["arm"], rows=[["ppo_clip"]])])``.
    """

    title: str
    blocks: Sequence[Block]
    subtitle: str = ""


def to_markdown(document: Document) -> str:
    """Write a document as GitHub-flavoured Markdown.

    Args:
        document: to be written.

    Returns:
        Markdown, ending in a newline.
    """
    parts = [f"# {escape_markdown(document.title)}"]
    if document.subtitle:
        parts.append(escape_markdown(document.subtitle))
    parts += [_block(block) for block in document.blocks]
    return "\n\n".join(part for part in parts if part) + "\n"


def escape_markdown(text: str) -> str:
    """Escape plain text so that Markdown shows it letter by letter, on a line of its own or within one.

    Args:
        text: from anywhere.

    Returns:
        Markdown without markup, links or HTML.
    """
    return _LINE_START.sub(_escape_start, _escape_within(text))


def cell_of(cell: str | Cell) -> Cell:
    """Give a cell given as text its form."""
    return cell if isinstance(cell, Cell) else Cell(text=cell)


def _block(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {escape_markdown(block.text)}"
    if isinstance(block, Paragraph):
        return escape_markdown(block.text)
    if isinstance(block, Bullets):
        return "\n".join(f"- {escape_markdown(item)}" for item in block.items)
    if isinstance(block, Table):
        return table_markdown(block)
    if isinstance(block, Picture):
        return _picture(block)
    if isinstance(block, Row):
        return "\n\n".join(_picture(picture) for picture in block.pictures)
    if isinstance(block, Note):
        return f"> {'**Warning.** ' if block.kind == 'warning' else ''}{escape_markdown(block.text)}"
    if isinstance(block, Code):
        fence = _fence(block.text, shortest=3)
        return f"{fence}\n{block.text}\n{fence}"
    return "\n\n".join([f"**{escape_markdown(block.title)}**", *(_block(inner) for inner in block.blocks)])


def table_markdown(table: Table) -> str:
    """Write one table as Markdown.

    Args:
        table: to be written.

    Returns:
        Markdown, its caption below it.
    """
    lines = ["| " + " | ".join(_escape_within(column) for column in table.columns) + " |"]
    lines.append("|" + "---|" * len(table.columns))
    lines += ["| " + " | ".join(_cell(cell_of(cell)) for cell in row) + " |" for row in table.rows]
    return "\n".join(lines + (["", escape_markdown(table.caption)] if table.caption else []))


def _cell(cell: Cell) -> str:
    if not cell.is_code or not cell.text:
        return _escape_within(cell.text)
    text = " ".join(cell.text.split()).replace("|", "\\|")
    fence = _fence(text, shortest=1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def _picture(picture: Picture) -> str:
    alt = escape_markdown(picture.alt)
    shown = f"![{alt}]({quote(picture.path)})" if picture.path else f"Figure: {alt}"
    return f"{shown}\n\n{escape_markdown(picture.caption)}" if picture.caption else shown


def _escape_within(text: str) -> str:
    line = " ".join(text.split())
    return _ENTITY.sub("&amp;", _EMPHASIS.sub(r"\\_", _SPECIAL.sub(r"\\\1", line)))


def _fence(text: str, *, shortest: int) -> str:
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    return "`" * (longest + 1 if longest >= shortest else shortest)


def _escape_start(found: re.Match[str]) -> str:
    space, mark = found.groups()
    return f"{space}{mark}\\" if mark.isdigit() else f"{space}\\{mark}"
