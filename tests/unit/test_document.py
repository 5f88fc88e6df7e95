import re
from html.parser import HTMLParser

import pytest

from evaluation.document import (
    Bullets,
    Cell,
    Code,
    Document,
    Fold,
    Heading,
    Note,
    Paragraph,
    Picture,
    Table,
    escape_markdown,
    to_markdown,
)
from evaluation.html import to_html

HOSTILE = """"><script>alert(1)</script><img src=//evil.example/x onerror='alert(1)'> [a](javascript:x) {{ 7*7 }}"""
SVG = b"<svg xmlns='http://www.w3.org/2000/svg' width='8' height='4'/>"


class Reader(HTMLParser):
    """Collects tags with their attributes, and the text outside of style and script."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self._inside = [], "", ""
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside not in ("style", "script"):
            self.text += data

    def all(self, name):
        return [attributes for tag, attributes in self.tags if tag == name]


def document(*blocks, title="t"):
    return Document(title=title, blocks=blocks)


def every_block(text):
    """A document that shows a text in every place that takes one."""
    return Document(
        title=text,
        subtitle=text,
        blocks=[
            *(Heading(text=text) for _ in range(3)),
            Heading(text=text, level=3),
            Paragraph(text=text),
            Bullets(items=[text]),
            Table(columns=[text, text], rows=[[text, Cell(text=text, tone="good", is_code=True)]], caption=text),
            Picture(image=SVG, alt=text, caption=text, path=text),
            Note(text=text, kind="warning"),
            Code(text=text),
            Fold(title=text, blocks=[Paragraph(text=text)]),
        ],
    )


def test_markdown_has_each_block_in_its_form():
    text = to_markdown(
        Document(
            title="Runs",
            subtitle="two arms",
            blocks=[
                Heading(text="Scores"),
                Table(
                    columns=["arm", "score"],
                    rows=[["a", Cell(text="0.5", tone="good")], [Cell(text="k", is_code=True), ""]],
                    caption="By arm.",
                ),
                Bullets(items=["one", "two"]),
                Note(text="mind", kind="warning"),
                Note(text="said"),
                Code(text="make all"),
                Fold(title="More", blocks=[Heading(text="Inner", level=3), Paragraph(text="end")]),
                Picture(image=SVG, alt="a line", caption="It rises.", path="figures/my line.svg"),
                Picture(image=SVG, alt="without a file"),
            ],
        )
    )
    assert text.split("\n\n") == [
        "# Runs",
        "two arms",
        "## Scores",
        "| arm | score |\n|---|---|\n| a | 0.5 |\n| `k` |  |",
        "By arm.",
        "- one\n- two",
        "> **Warning.** mind",
        "> said",
        "```\nmake all\n```",
        "**More**",
        "### Inner",
        "end",
        "![a line](figures/my%20line.svg)",
        "It rises.",
        "Figure: without a file\n",
    ]


@pytest.mark.parametrize(
    ("plain", "escaped"),
    [
        ("trm_avg_0.001 x_1", "trm_avg_0.001 x_1"),
        ("_a_ *b* `c`", r"\_a\_ \*b\* \`c\`"),
        ("<b>&lt;", r"\<b\>&amp;lt;"),
        ("a & b", "a & b"),
        ("a|b\nc", r"a\|b c"),
        ("# no heading", r"\# no heading"),
        ("- no list", r"\- no list"),
        ("12. no list", r"12\. no list"),
        ("1.5 apples", r"1\.5 apples"),
        ("![x](y)", r"!\[x\](y)"),
        ("a\\b", r"a\\b"),
    ],
)
def test_plain_text_is_escaped_for_markdown(plain, escaped):
    assert escape_markdown(plain) == escaped


def test_code_in_markdown_is_fenced_by_more_ticks_than_it_holds():
    text = to_markdown(document(Table(columns=["key"], rows=[[Cell(text="a``|`", is_code=True)]]), Code(text="a\n```")))
    assert "| ``` a``\\|` ``` |" in text
    assert "````\na\n```\n````" in text


def test_hostile_text_is_shown_letter_by_letter_and_makes_no_tag_and_no_attribute():
    plain, hostile = Reader(to_html(every_block("x"))), Reader(to_html(every_block(HOSTILE)))
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in plain.tags]
    assert [set(attributes) for _, attributes in hostile.tags] == [set(attributes) for _, attributes in plain.tags]
    assert hostile.text.count(HOSTILE) == plain.text.count("x") == 22
    assert hostile.all("img")[0]["alt"] == HOSTILE


def test_hostile_text_makes_no_markup_in_markdown():
    text = to_markdown(every_block(HOSTILE))
    outside_of_code = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)
    assert not re.search(r"(?<!\\)<\w", outside_of_code)
    assert "](javascript" not in outside_of_code.replace(r"\](javascript", "")


def test_nothing_is_asked_for_from_outside():
    html = to_html(every_block("x"))
    reader = Reader(html)
    assert not reader.all("link")
    assert all(image["src"].startswith("data:") for image in reader.all("img"))
    assert all("src" not in script for script in reader.all("script"))
    assert all(link["href"].startswith("#") for link in reader.all("a"))
    assert "url(" not in html
    assert "@import" not in html
    (policy,) = [meta["content"] for meta in reader.all("meta") if "http-equiv" in meta]
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert "unsafe" not in policy


def test_sections_are_listed_and_linked_and_equal_names_have_places_of_their_own():
    html = to_html(document(Heading(text="A"), Heading(text="B"), Heading(text="A"), Heading(text="c", level=3)))
    reader = Reader(html)
    places = [heading["id"] for heading in reader.all("h2")]
    assert [link["href"] for link in reader.all("a")] == [f"#{place}" for place in places]
    assert len(set(places)) == 3


def test_an_image_is_embedded_with_its_description_and_its_dark_form():
    dark = b"\x89PNG\r\n\x1a\n dark"
    images = Reader(to_html(document(Picture(image=SVG, dark_image=dark, alt="d"), Picture(image=SVG, alt="e"))))
    assert [(image["class"], image["alt"]) for image in images.all("img")] == [
        ("in-light", "d"),
        ("in-dark", "d"),
        ("on-white", "e"),
    ]
    assert images.all("img")[0]["src"].startswith("data:image/svg+xml;base64,PHN2Zy")
    assert images.all("img")[1]["src"].startswith("data:image/png;base64,iVBORw0KGgo")


def test_bytes_that_are_no_image_are_refused():
    with pytest.raises(ValueError, match="PNG or an SVG"):
        to_html(document(Picture(image=b"GIF89a", alt="x")))


def test_columns_of_numbers_alone_are_set_to_the_right():
    table = Table(
        columns=["arm", "mean", "word", "none"],
        rows=[["1", "0.40 (0.20 to 0.60)", "1", ""], ["2", "", "x", ""], ["3", "-1.2e-05", "2", ""]],
    )
    heads = Reader(to_html(document(table))).all("th")[:4]
    assert [head.get("class") for head in heads] == ["number", "number", None, None]


def test_a_row_of_another_width_than_the_heads_is_refused():
    with pytest.raises(ValueError, match="2 cells, got 1"):
        Table(columns=["a", "b"], rows=[["a"]])
