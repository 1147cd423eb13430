"""Texts beside the pages of a namespace: its description, and the kinds of its pages."""

import re

import msgspec

from kvxfer.pages.page_cipher import KEY_ID_BYTES
from kvxfer.storage.integrity import Integrity
from kvxfer.storage.keys import Namespace

MAX_TEXT_BYTES = 16 << 20
"""Most bytes of a text that are read: namespaces with thousands of tensors have a few MiB."""

RECORDS = {kind: f"integrity.{kind.value}" for kind in Integrity}
"""Files beside the pages: each allows for pages of one kind in the namespace."""

_KEY_ID = re.compile(f"^[0-9a-f]{{{2 * KEY_ID_BYTES}}}$", re.MULTILINE)


def describe_namespace(namespace: Namespace) -> str:
    """Describe every field of a namespace, as a `namespace.json` has them."""
    text = msgspec.json.format(msgspec.json.encode(namespace.fields()), indent=2).decode()
    return text + "\n"


def with_key(record: str | None, key_id: str) -> str:
    """Add the name of a key to a record of sealed pages, or to none."""
    return "\n".join([Integrity.SEALED.value, *sorted({*key_ids_in(record), key_id}), ""])


def key_ids_in(record: str | None) -> list[str]:
    """List the names of keys in a record of sealed pages."""
    return _KEY_ID.findall(record or "")
