"""The built documentation, `make docs`, as a reader sees it in a browser: wide, on a phone, and by search."""

import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import needs
from tests.site.browser import Browser, browsing

SITE = Path(__file__).parents[2] / "site"
WIDTHS = (1280, 390)
MIN_TEXT_PIXELS = 7
LOOK = (Path(__file__).parent / "look.js").read_text() % MIN_TEXT_PIXELS
FAULTS = ("too_wide", "cut_off", "broken_names", "no_picture", "small_pictures")
NUM_RESULTS = 3
# Pages whose names are typed are the first result.
FIRST = {"explain", "events", "host pool", "retention", "kvxfer replay", "doctor"}
# Words that a reader types, and the pages of which one is meant.
SEARCHES = {
    "PYTHONHASHSEED": {"cli/"},
    "lease": {"prefill-decode/"},
    "checksum": {"failures/", "files/"},
    "vllm serve": {"vllm/"},
    "SGLang": {"sglang/"},
    "namespace": {"concepts/"},
    "cache_salt": {"prefill-decode/", "fleets/"},
    "block table": {"allocation/"},
    "conformance suite": {"backends/"},
    "hit rate": {"fleets/"},
    "fsck": {"cli/"},
    "kubernetes": {"fleets/"},
    "tenants": {"fleets/"},
    "doctor": {"cli/"},
    "explain": {"cli/"},
    "why a request missed": {"cli/"},
    "events": {"metrics/"},
    "host pool": {"peers/"},
    "retention": {"vllm/"},
    "kvxfer replay": {"fleets/"},
    "kvxfer gc": {"cli/"},
}
# Types into the search, waits for what it says of the words, and returns the pages of the results.
FIND = """(async () => {
  const [input] = document.querySelectorAll("[data-md-component=search-query]");
  const [list] = document.querySelectorAll(".md-search-result__list");
  const [summary] = document.querySelectorAll(".md-search-result__meta");
  const type = async (text, hasEnded) => {
    input.focus();
    input.value = text;
    input.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
    while (!hasEnded()) await new Promise((next) => setTimeout(next, 20));
  };
  const toggle = document.querySelector("#__search");
  if (!toggle.checked) toggle.click();
  await type("", () => !/match/.test(summary.textContent));
  await type(%r, () => /match/.test(summary.textContent));
  const shown = [...list.querySelectorAll("li > a")].filter((each) => each.getClientRects().length);
  return shown.map((each) => each.href);
})()"""

# Every page would make its own index of the words of all.
NO_SEARCH = "window.Worker = class extends EventTarget { postMessage() {} terminate() {} }"

pytestmark = [
    needs.chromium,
    pytest.mark.skipif(not SITE.exists(), reason="needs the documentation: `make docs`"),
    pytest.mark.timeout(300),
]


class Look:
    """What a reader sees of the pages of a folder that is wrong: each with its page."""

    def __init__(self, browser: Browser, folder: Path) -> None:
        self.faults: dict[str, list[str]] = {name: [] for name in FAULTS}
        self.complaints: list[str] = []
        self.dead: list[str] = []
        without_search = browser.call("Page.addScriptToEvaluateOnNewDocument", source=NO_SEARCH)
        links: set[tuple[str, str]] = set()
        files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        pages = {name for name in files if name.endswith(".html")}
        places = {browser.base + name for name in files - pages}
        for page in sorted(name.removesuffix("index.html") for name in pages):
            browser.open(page)
            for width in WIDTHS:
                browser.resize(width)
                seen = browser.evaluate(LOOK)
                for name in FAULTS:
                    self.faults[name] += [f"{page} at {width}: {each}" for each in seen[name]]
            self.complaints += [f"{page}: {each}" for each in browser.complaints()]
            here = browser.base + page
            places |= {here, *(f"{here}#{name}" for name in seen["ids"])}
            links |= {(page, each) for each in seen["links"] if each.startswith(browser.base)}
        browser.call("Page.removeScriptToEvaluateOnNewDocument", **without_search)
        for page, link in sorted(links):
            target, anchor = urllib.parse.urldefrag(link)
            if f"{target}#{urllib.parse.unquote(anchor)}".removesuffix("#") not in places:
                self.dead.append(f"{page}: {link.removeprefix(browser.base)}")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(SITE, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def site(browser: Browser) -> Look:
    return Look(browser, SITE)


@pytest.mark.parametrize("fault", FAULTS)
def test_pages_are_whole_at_every_width(site: Look, fault: str) -> None:
    assert site.faults[fault] == []


def test_no_page_has_an_error_or_asks_another_site(site: Look) -> None:
    assert site.complaints == []


def test_every_link_within_the_site_leads_somewhere(site: Look) -> None:
    assert site.dead == []


def test_the_search_finds_the_page_that_is_meant(browser: Browser) -> None:
    browser.resize(WIDTHS[0])
    browser.open("")
    found = {
        words: [link.removeprefix(browser.base) for link in browser.evaluate(FIND % words)]
        for words in SEARCHES
    }
    pages = {
        words: list(dict.fromkeys(re.sub("[?#].*", "", link) for link in links))[:NUM_RESULTS]
        for words, links in found.items()
    }
    assert [
        (words, pages[words])
        for words, meant in SEARCHES.items()
        if not meant & {*pages[words][: 1 if words in FIRST else NUM_RESULTS]}
    ] == []
