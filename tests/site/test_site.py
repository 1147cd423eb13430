"""The built documentation, as a reader sees it in a browser, on a wide screen and on a phone."""

from pathlib import Path

import pytest

from tests import needs
from tests.site.browser import browsing

SITE = Path(__file__).parents[2] / "site"
WIDTHS = (1280, 390)
MIN_TEXT_PIXELS = 7
LOOK = (Path(__file__).parent / "look.js").read_text() % MIN_TEXT_PIXELS
# Every page would make its own index of the words of all.
NO_SEARCH = "window.Worker = class extends EventTarget { postMessage() {} terminate() {} }"


@needs.chromium
@pytest.mark.skipif(not SITE.exists(), reason="needs the documentation: `make docs`")
@pytest.mark.timeout(300)
def test_pages_are_whole_at_every_width_and_ask_no_other_site(tmp_path: Path) -> None:
    faults: list[str] = []
    with browsing(SITE, tmp_path) as browser:
        browser.call("Page.addScriptToEvaluateOnNewDocument", source=NO_SEARCH)
        pages = [str(path.relative_to(SITE)) for path in SITE.rglob("*.html")]
        for page in sorted(name.removesuffix("index.html") for name in pages):
            browser.open(page)
            for width in WIDTHS:
                browser.resize(width)
                for fault, places in browser.evaluate(LOOK).items():
                    faults += [f"{page} at {width}: {fault}: {each}" for each in places]
            faults += [f"{page}: {each}" for each in browser.complaints()]
    assert faults == []
