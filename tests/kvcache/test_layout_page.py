"""Documentation page of the layout zoo: it shows the zoo's present data."""

import pytest

from kvxfer.engine_side import LAYOUT_ZOO
from tests.kvcache.layout_page import DOCS, IMAGES, PAGE, in_pieces, layout_page, picture


def test_the_page_and_its_pictures_are_up_to_date() -> None:
    files = layout_page()
    committed = {f"{IMAGES}/{path.name}" for path in (DOCS / IMAGES).iterdir()} | {PAGE}
    assert committed == files.keys(), "run `make layouts`"
    for name, text in files.items():
        assert (DOCS / name).read_text() == text, f"{name} is old; run `make layouts`"


def test_a_picture_shows_as_many_pieces_as_there_are() -> None:
    drawn = {"layer": 2, "kv": 2, "head": 2, "token": 2, "kernel": 1, "state": 2}
    latents = drawn | {"kv": 1, "head": 1, "token": 4}
    for entry in LAYOUT_ZOO:
        sizes = latents if entry.content == "latents" else drawn
        assert picture(entry).count("<path") == entry.runs_per_block(sizes)


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("K and V first, NHD", "56 pieces of 32 KiB"),
        ("All layers, NHD", "one piece of 1.75 MiB"),
        ("MLA", "27 pieces of 72 KiB"),
        ("All layers, MLA", "one piece of 1.9 MiB"),
    ],
)
def test_the_published_sizes_are_on_the_page(name: str, pieces: str) -> None:
    (entry,) = (entry for entry in LAYOUT_ZOO if entry.name == name)
    assert in_pieces(entry).endswith(pieces)
