"""A document as one HTML file: it asks for nothing from anywhere, and reads in the light, in the dark and on a phone.

Every text goes through Jinja2's autoescape. The content security policy allows images within the file, this file's
own style and its own script by their hashes, and nothing else: what has slipped in does not run.
"""

import base64
import hashlib
import re
from collections.abc import Iterator

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from evaluation.document import Cell, Document, Heading, Table, cell_of
from evaluation.html_template import SCRIPT, STYLE, TEMPLATE

_NUMBER = re.compile(r"[-+]?\d[\d.,e+-]*%?( \([^();]*\))?|[-+]?inf|-|")
_PNG, _SVG = b"\x89PNG\r\n\x1a\n", re.compile(rb"\s*(<\?xml|<!DOCTYPE svg|<svg)")


def to_html(document: Document) -> str:
    """Write a document as one self-contained HTML file.

    Args:
        document: to be written.

    Returns:
        HTML in which every image is a data URI.

    Raises:
        ValueError: if an image is neither a PNG nor an SVG.
    """
    environment = Environment(
        loader=DictLoader({"document": TEMPLATE}),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"data_uri": data_uri, "cell": cell_of, "identity": id}
    environment.filters |= {"number_columns": _number_columns, "longest_line": _longest_line}
    names = _anchors(document)
    return environment.get_template("document").render(
        document=document,
        style=Markup(STYLE),
        script=Markup(SCRIPT),
        policy=f"default-src 'none'; img-src data:; style-src {_hash(STYLE)}; script-src {_hash(SCRIPT)}; "
        "base-uri 'none'; form-action 'none'",
        sections=[block for block in document.blocks if isinstance(block, Heading) and block.level == 2],
        anchors=names,
        kind=lambda block: type(block).__name__,
    )


def data_uri(image: bytes) -> str:
    """Encode an image for the ``src`` of an ``<img>``, in which no script of an SVG runs.

    Args:
        image: bytes of a PNG or SVG.

    Returns:
        A data URI.

    Raises:
        ValueError: if it is neither.
    """
    if image.startswith(_PNG):
        kind = "png"
    elif _SVG.match(image):
        kind = "svg+xml"
    else:
        raise ValueError(f"an image must be a PNG or an SVG, got bytes that begin with {image[:8]!r}")
    return f"data:image/{kind};base64,{base64.b64encode(image).decode('ascii')}"


def _number_columns(table: Table) -> list[bool]:
    """Which columns hold numbers alone, and are set to the right."""
    columns = [[cell_of(row[index]).text for row in table.rows] for index in range(len(table.columns))]
    return [
        any(text.strip("-") for text in texts) and all(_NUMBER.fullmatch(text) for text in texts) for texts in columns
    ]


def _longest_line(cell: Cell) -> int:
    """Letters of the longest line, which is what takes room."""
    return max(map(len, cell.text.splitlines()), default=0)


def _anchors(document: Document) -> dict[int, str]:
    """Name the place of each heading, by the heading's identity; equal texts get different names."""
    return {id(block): f"{number}-{_slug(block.text)}" for number, block in _headings(document)}


def _headings(document: Document) -> Iterator[tuple[int, Heading]]:
    yield from ((number, block) for number, block in enumerate(document.blocks) if isinstance(block, Heading))


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"
