"""report.html in a real browser: offline, in the light and in the dark, on a desk and on a phone."""

import re
from pathlib import Path

import pytest

from tests.browser import Browser

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SHOWN = "[...document.images].filter(image => image.checkVisibility())"


@pytest.fixture
def page(smoke: Path) -> str:
    return (smoke / "runs" / "report.html").as_uri()


def set_view(browser: Browser, theme: str, width: int, height: int) -> None:
    is_mobile = width < 500
    browser.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_mobile
    )
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])


def background(browser: Browser) -> int:
    """Brightness of the page, 0 to 255."""
    colour = browser.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    return sum(colour) // 3


def test_the_report_reads_offline_in_both_themes_on_a_desk_and_on_a_phone(page: str, tmp_path: Path):
    with Browser(tmp_path) as browser:
        browser.call("Network.enable")
        browser.call(
            "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0
        )
        for theme in ("light", "dark"):
            for width, height in ((1280, 900), (390, 844)):
                set_view(browser, theme, width, height)
                browser.open(page)
                assert browser.errors == []
                assert browser.evaluate("document.images.length") > 10
                assert browser.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
                assert browser.evaluate("[...document.images].every(image => image.alt.length > 10)")
                assert browser.evaluate(f"{SHOWN}.length") * 2 == browser.evaluate("document.images.length")
                assert browser.evaluate("document.documentElement.scrollWidth") <= width
                assert (background(browser) > 128) == (theme == "light")
                requests = browser.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
                assert all(name.startswith("data:") for name in requests)
        assert browser.evaluate("getComputedStyle(document.querySelector('.stacked td')).display") == "block"
        assert browser.evaluate("getComputedStyle(document.querySelector('.stacked td')).whiteSpace") == "pre-line"


def test_the_reader_can_choose_the_theme_and_open_what_is_folded(page: str, tmp_path: Path):
    with Browser(tmp_path) as browser:
        set_view(browser, "light", 1280, 900)
        browser.open(page)
        brightness = [background(browser)]
        for _ in range(3):  # auto, light, dark, auto
            browser.evaluate("document.getElementById('theme').click()")
            brightness.append(background(browser))
        assert [value > 128 for value in brightness] == [True, True, False, True]
        assert browser.evaluate("document.querySelector('details').open") is False
        browser.evaluate("document.querySelector('summary').click()")
        assert browser.evaluate("document.querySelector('details').open") is True
        targets = browser.evaluate("[...document.querySelectorAll('nav a')].map(link => link.hash.slice(1))")
        assert len(targets) > 5
        assert all(browser.evaluate(f"document.getElementById({target!r}) !== null") for target in targets)
        assert browser.errors == []


def test_the_files_named_in_the_markdown_are_there(page: str):
    folder = Path(page.removeprefix("file://")).parent
    paths = re.findall(r"\]\((figures/[^)]+)\)", (folder / "report.md").read_text())
    assert len(paths) > 5
    assert all((folder / path).is_file() for path in paths)
