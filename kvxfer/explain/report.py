"""Report: the blocks of a request, or blocks by their keys, explained in runs of equal answers."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from pathlib import Path

import msgspec

from kvxfer.errors import InvalidArgumentError
from kvxfer.explain.answer import Answer, Cause, Explained, Explainer
from kvxfer.explain.history import History, Kind, Place, Request, read_history
from kvxfer.storage.keys import GROUP_INDEX_BYTES, BlockKey, group_of
from kvxfer.text import printable

MAX_CHARACTERS = 200
MAX_NAMES = 4
"""Maximum number of request names in a report: vLLM gives a client's request another name in each
engine."""

_BEFORE = "not looked up: in the engine's own cache, or not needed"
_AFTER_MISS = "not looked up: after a missed block"

_LOOKUP_KINDS = frozenset({Kind.FOUND, Kind.MISSED})


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """Run of blocks with equal answers.

    Attributes:
        first, last: Positions of the first and the last block in the group, or among the keys.
        tier: Tier that gave the blocks; empty if they were not found.
        text: The answer as text.
        keys: Keys of the blocks, in hexadecimal digits.
    """

    group: int
    first: int
    last: int
    answer: Answer
    tier: str
    text: str
    keys: list[str]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Report of one request, or of keys.

    Attributes:
        request: Name of the request; empty for keys.
        at_s: Time at which the request was scheduled; for keys, time of the last record.
        found: Number of blocks that each tier gave.
        missed: Number of blocks that were missed, by answer.
        notes: Remarks, such as on what the journal lacks.
    """

    request: str
    at_s: float
    num_blocks: int
    found: dict[str, int]
    missed: dict[str, int]
    not_looked_up: int
    runs: list[Run]
    notes: list[str]


def explain(arguments: Sequence[str], folder: Path) -> list[Report]:
    """Explain a request by a part of its name, or blocks by their keys in hexadecimal digits.

    Returns:
        A report for each time the request was scheduled, such as in several engines; one for keys.
    """
    keys, is_single = [_parse_key(each) for each in arguments], len(arguments) == 1
    known = [key for key in keys if key]
    history = read_history(folder, request=arguments[0] if is_single else "", keys=known)
    if history.requests:
        _require_few_names(history, arguments[0])
        return [_of_request(history, each) for each in history.requests]
    for index, (argument, key) in enumerate(zip(arguments, keys, strict=True)):
        if key is None:
            name = "argument" if is_single else f"arguments[{index}]"
            requests = f", or one of the {history.num_requests} requests of the journal"
            expected = "a key of a block in hexadecimal digits" + requests * is_single
            raise InvalidArgumentError(name, argument, expected)
    return [_of_keys(history, known)]


def _parse_key(text: str) -> BlockKey | None:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        return None
    return BlockKey(key) if len(key) > GROUP_INDEX_BYTES else None


def _require_few_names(history: History, argument: str) -> None:
    names = list(dict.fromkeys(each.event.request_id for each in history.requests))
    if len(names) > MAX_NAMES:
        some = ", ".join(names[:MAX_NAMES])
        rule = f"a part of the names of at most {MAX_NAMES} requests, not of {some}, ..."
        raise InvalidArgumentError("argument", argument, rule)


def _of_request(history: History, seen: Request) -> Report:
    at_s, place, request = seen
    explainer = Explainer(history, place)
    blocks: list[Explained] = []
    asked: set[int] = set()  # groups
    for key, tier in zip(request.keys, request.tiers, strict=True):
        if tier is None:
            is_after_miss = group_of(key) in asked
            text = _AFTER_MISS if is_after_miss else _BEFORE
            blocks.append(_plain(key, Answer.NOT_LOOKED_UP, "", request.reason or text))
            continue
        asked.add(group_of(key))
        if not tier and request.reason:
            blocks.append(_plain(key, Answer.FAILED, "", f"refused: {request.reason}"))
        elif tier and (failed_s := history.failed_s(key, place, at_s)) is not None:
            blocks.append(explainer.explain(key, failed_s, since_s=at_s))
        elif tier:
            by = explainer.giver(key, tier, at_s)
            blocks.append(_plain(key, Answer.FOUND, by, f"from {by}"))
        else:
            blocks.append(explainer.explain(key, at_s))
    name = printable(request.request_id, MAX_CHARACTERS)
    report = _report(history, name, at_s, blocks, [place])
    if not request.keys:
        why = request.reason or "no whole block of it is known, as for a short prompt"
        report.notes.append(printable(why, MAX_CHARACTERS))
    return report


def _of_keys(history: History, keys: Sequence[BlockKey]) -> Report:
    places: list[Place] = []
    blocks: list[Explained] = []
    for key in keys:
        happened = history.happenings[key]
        if not happened:
            text = "never stored, and never looked up"
            text += ", nor part of a request's name" * (len(keys) == 1)
            blocks.append(_plain(key, Answer.NEVER_STORED, "", text))
            continue
        asked = [each for each in happened if not history.held_as(each.place)]
        happened = asked or happened  # lookups of engines in a holder are not the holder's
        lookups = [each for each in happened if each.kind in _LOOKUP_KINDS]
        last = (lookups or happened)[-1]
        places.append(last.place)
        # Only this place's, and only by one event type: `Requested` repeats its `LookedUp`.
        same = [each for each in lookups[:-1] if (each.place, each.what) == (last.place, last.what)]
        since_s = same[-1].at_s if same else 0.0
        until_s = last.at_s if lookups else history.ends_s
        if last.kind is Kind.FOUND:
            failed_s = history.failed_s(key, last.place, last.at_s)
            if failed_s is None:
                when = time.strftime("%H:%M:%S", time.localtime(last.at_s))
                found = f"from {last.tier}, looked up last at {when}"
                blocks.append(_plain(key, Answer.FOUND, last.tier, found))
                continue
            since_s, until_s = last.at_s, failed_s
        explained = Explainer(history, last.place).explain(key, until_s, since_s=since_s)
        if not lookups:
            held = [cause for cause in explained.causes if cause.answer is Answer.UNKNOWN]
            if held:
                text = f"in {held[0].tier}, and never looked up"
                blocks.append(_plain(key, Answer.FOUND, held[0].tier, text))
                continue
        blocks.append(explained)
    return _report(history, "", history.ends_s, blocks, places)


def _plain(key: BlockKey, answer: Answer, tier: str, text: str) -> Explained:
    return Explained(key, answer, (Cause(answer, tier, text, None),))


def _report(
    history: History,
    request: str,
    at_s: float,
    blocks: Sequence[Explained],
    places: Sequence[Place],
) -> Report:
    found = Counter(each.causes[0].tier for each in blocks if each.answer is Answer.FOUND)
    missed = Counter(each.answer.value for each in blocks)
    num_skipped = missed.pop(Answer.NOT_LOOKED_UP, 0)
    missed.pop(Answer.FOUND, 0)
    return Report(
        request=request,
        at_s=at_s,
        num_blocks=len(blocks),
        found=dict(found),
        missed=dict(missed),
        not_looked_up=num_skipped,
        runs=list(_runs(blocks, is_request=bool(request))),
        notes=_notes(history, blocks, places),
    )


def _runs(blocks: Sequence[Explained], *, is_request: bool) -> Iterator[Run]:
    """Merge neighbours with equal answers; blocks of a request are counted group by group."""
    groups: dict[int, list[Explained]] = defaultdict(list)
    for each in blocks:
        groups[group_of(each.key) if is_request else 0].append(each)
    for group, members in groups.items():
        runs = [list(run) for _, run in groupby(members, key=_signature)]
        starts = accumulate(map(len, runs), initial=0)
        for start, run in zip(starts, runs, strict=False):
            first = run[0]
            is_found = first.answer is Answer.FOUND
            yield Run(
                group=group,
                first=start,
                last=start + len(run) - 1,
                answer=first.answer,
                tier=first.causes[0].tier if is_found else "",
                text="; ".join(_texts(run)),
                keys=[each.key.hex() for each in run],
            )


def _signature(explained: Explained) -> tuple[object, ...]:
    return explained.answer, *((cause.tier, cause.text) for cause in explained.causes)


def _texts(run: Sequence[Explained]) -> Iterator[str]:
    """Yield each cause of a run, with the time, or the first and last time, at which it acted."""
    for causes in zip(*(each.causes for each in run), strict=True):
        text = printable(causes[0].text, MAX_CHARACTERS * 4)
        times = [cause.at_s for cause in causes if cause.at_s is not None]
        yield f"{text} {_between(min(times), max(times))}" if times else text


def _between(first_s: float, last_s: float) -> str:
    is_today = time.localtime()[:3] == time.localtime(first_s)[:3]
    form = "%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S"
    first, last = (time.strftime(form, time.localtime(each)) for each in (first_s, last_s))
    return f"at {first}" if first == last else f"from {first} to {last}"


def _notes(history: History, blocks: Sequence[Explained], places: Sequence[Place]) -> list[str]:
    """List what cannot be known: events before the journal begins, and those that it lost."""
    processes = dict.fromkeys(place.process for place in places) or history.begins_s
    begins_s = max(history.begins_s[process] for process in processes)
    notes = []
    if any(each.answer in (Answer.NEVER_STORED, Answer.UNKNOWN) for each in blocks):
        notes.append(f"the journal begins {_between(begins_s, begins_s)}: nothing earlier is known")
    notes += [
        f"the journal lost {each.num_events} events {_between(each.at_s, each.at_s)}"
        for each in history.lost
    ]
    return notes
