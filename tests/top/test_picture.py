"""The picture of watched processes: what it says, and that it fits a terminal."""

import io
import re
from datetime import UTC, datetime

import pytest
from rich.console import Console
from rich.live import Live

from kvxfer.endpoint import Endpoint
from kvxfer.storage.gauge import Gauge
from kvxfer.telemetry.metrics import Metrics
from kvxfer.top import WIDTH, WatchedProcess, parse_scrape, picture
from tests.top import recorded

WHEN = datetime(2026, 11, 23, 15, 4, 5, tzinfo=UTC)
NOW_S = 1000.0
LINES = 24


def process(*rounds: int, metrics: Metrics | None = None, port: int = 8080) -> WatchedProcess:
    """Watch a process that has worked these numbers of rounds before each of its scrapes."""
    metrics = metrics or recorded.watched()
    watched = WatchedProcess(Endpoint("node-1", port))
    for index, number in enumerate(rounds):
        for _ in range(number):
            recorded.work(metrics)
        at_s = NOW_S - 2.0 * (len(rounds) - 1 - index)
        watched.note(parse_scrape(recorded.text(metrics), at_s))
    return watched


def drawn(*processes: WatchedProcess, width: int = WIDTH) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as capture:
        console.print(picture(processes, interval_s=2.0, when=WHEN, now_s=NOW_S), end="")
    return [line.rstrip() for line in capture.get().splitlines()]


def fields(lines: list[str], head: str) -> list[list[str]]:
    """Find the lines that begin with a word, each split where two spaces or one are."""
    return [line.split()[1:] for line in lines if line.startswith(f"{head} ")]


def test_one_process_with_two_tiers_fits_80_columns_and_24_lines() -> None:
    lines = drawn(process(1, 2))
    assert max(map(len, lines)) <= WIDTH
    assert len(lines) <= LINES
    assert lines[0] == "kvxfer top  2026-11-23 15:04:05  rates over 2 s"
    assert not any("…" in line for line in lines), "something was cut off"


def test_it_shows_room_hits_evictions_and_moves_of_each_tier() -> None:
    room, moves, *_ = fields(lines := drawn(process(1, 2)), "host")
    assert " ".join(room) == "2.0 GiB 8.0 GiB 25% 1024 50% 50% 5 4"
    assert " ".join(moves) == "10 10.0 MiB 3.9 ms 0 0 B -"
    room, moves, *_ = fields(lines, "file")
    assert " ".join(room) == "50.0 GiB 200.0 GiB 25% 1.2M 20% 20% 2 0"
    assert " ".join(moves) == "0 0 B 16 ms 8 8.0 MiB 31 ms"


def test_it_says_in_words_what_is_wrong() -> None:
    said = re.sub(r"\s+", " ", " ".join(drawn(process(1, 2))))
    stops = "writing is paused after repeated errors of the disk; not called for now, since it"
    moved = "not stored: 30 failed; not loaded: 3 corrupt, 3 timed out; late calls: 3"
    skipped = "blocks skipped while it was not called: 30; blocks not copied to it: 18"
    computed = "blocks computed, which is faster: 9"
    for words in (
        f"file {stops} missed a deadline; corrupt files in quarantine: 2; blocks that wait to be",
        "host 4.0 KiB held back, since late reads may change it",
        f"file since the start {moved}; {skipped}; {computed}; removed as corrupt: 3",
        "engine waiting: 3, in flight: 12.0 MiB, deadlines missed since the start: 3",
        "a store takes 10 ms, 2.0 ms of it in the queue",
        "peers connected: 2, batches pinned: 1, leases: 4",
        "lookups 70% found since the start, 70% found now, 10 blocks/s, 300 us a lookup",
    ):
        assert words in said
    assert "trouble" not in said


@pytest.mark.parametrize("failing", [0.0, 1.0])
def test_peers_that_are_known_are_counted_and_discovery_that_fails_is_said(failing: float) -> None:
    metrics = recorded.watched()
    states = {Gauge.PEERS_KNOWN: 3, Gauge.DISCOVERY_FAILING: failing}
    metrics.watch("nixl", lambda: states)
    text = "\n".join(drawn(process(1, metrics=metrics)))
    assert "connected: 2, known: 3, batches pinned: 1" in text
    assert ("discovery gets no answers" in text) == bool(failing)


def test_without_trouble_it_says_so() -> None:
    metrics = Metrics()
    metrics.watch("host", lambda: {Gauge.CAPACITY_BYTES: 1 << 30})
    lines = drawn(process(0, 0, metrics=metrics))
    assert "trouble  no block corrupt, failed or late since the start" in lines
    assert "no block was stored or asked for yet" in drawn(process(0, metrics=Metrics()))


def test_what_is_not_known_yet_is_a_dash() -> None:
    room, moves, *_ = fields(drawn(process(1)), "host")
    assert " ".join(room) == "2.0 GiB 8.0 GiB 25% 1024 50% - - -"
    assert " ".join(moves) == "- - - - - -"


def test_the_lookups_of_vllm_are_shown_in_its_tokens() -> None:
    watched = WatchedProcess(Endpoint("node-1", 8000))
    for number, at_s in ((100, NOW_S - 2), (300, NOW_S)):
        text = (
            f"vllm:external_prefix_cache_queries_total {number}\n"
            f"vllm:external_prefix_cache_hits_total {number / 2}\n"
            'vllm:kvxfer_blocks_in_use{tier="host"} 3\n'
        )
        watched.note(parse_scrape(text, at_s))
    lines = drawn(watched)
    assert "lookups  50% found since the start, 50% found now, 100 tokens/s (vLLM)" in lines
    assert "host     chunks in use: 3" in lines


def test_a_process_that_does_not_answer_comes_first_with_its_error() -> None:
    dead = WatchedProcess(Endpoint("node-2", 8080))
    dead.fail("Connection refused", NOW_S - 90)
    dead.fail("Connection\x1b[2J refused " + "x" * 300, NOW_S - 2)
    lines = drawn(process(1, 2), dead)
    assert lines[2].startswith("node-2:8080  no metrics for 1 min: Connection\\x1b[2J refused")
    assert max(map(len, lines)) <= WIDTH
    assert any(line.startswith("node-1:8080  answered in") for line in lines)


def test_a_process_that_was_restarted_says_so_and_has_no_rates_yet() -> None:
    watched = process(3)
    anew = recorded.watched()
    recorded.work(anew)
    watched.note(parse_scrape(recorded.text(anew), NOW_S - 5))
    lines = drawn(watched)
    assert any(line.endswith("restarted 5 s ago: counters began anew") for line in lines)
    room, moves, *_ = fields(lines, "host")
    assert room[-3:] == ["-", "-", "-"]
    recorded.work(anew)
    watched.note(parse_scrape(recorded.text(anew), NOW_S))
    room, moves, *_ = fields(drawn(watched), "host")
    assert (room[-2:], moves[0]) == (["1", "0.8"], "2")


def test_names_of_others_are_text_and_never_break_the_picture() -> None:
    metrics = recorded.watched()
    name = "[red]a-very-long-name\x1b]0;of-a-tier-that-somebody-else-has-written"
    metrics.watch(name, lambda: recorded.STATES["file"])
    recorded.work(metrics)
    lines = drawn(process(1, 1, metrics=metrics))
    assert max(map(len, lines)) <= WIDTH
    assert any(line.startswith("[red]a-v") for line in lines)
    assert "\x1b" not in "".join(lines)
    assert " ".join(fields(lines, "host")[0]) == "2.0 GiB 8.0 GiB 25% 1024 50% 50% 2.5 2"


@pytest.mark.parametrize("width", [80, 200])
def test_a_low_terminal_shows_the_beginning_and_says_how_much_is_missing(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")  # of a dumb one nobody knows the height
    console = Console(
        file=io.StringIO(), width=width, height=LINES, force_terminal=True, color_system=None
    )
    several = [process(1, 2, port=port) for port in (1, 2, 3)]
    content = picture(several, interval_s=2.0, when=WHEN, now_s=NOW_S)
    with console.capture() as capture, Live(content, console=console, screen=True) as live:
        live.refresh()
    frame = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "\n\n", capture.get()).split("kvxfer top")[-1]
    lines = [line.rstrip() for line in f"kvxfer top{frame}".strip().splitlines()]
    assert len(lines) == LINES
    assert max(map(len, lines)) <= WIDTH
    hidden = len(drawn(*several)) - (LINES - 1)
    assert lines[-1] == f"... {hidden} more lines in a taller terminal"
