"""Bodies of the two legs of a request: for the prefill engine, and for the decode engine."""

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

import msgspec

from kvxfer.endpoint import MAX_PORT
from kvxfer.errors import InvalidArgumentError

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
PARAMS = "kv_transfer_params"
EXTRA = "vllm_xargs"
"""Field of a request from which vLLM also takes `kv_transfer_params`."""

# Request to a prefill engine to lend blocks; its answer has the values for the decode engine.
# Source: vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py, and the proxy of
# vLLM's tests, tests/v1/kv_connector/nixl_integration/toy_proxy_server.py
LEND: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)
# P generates one token. OpenAI's responses name that limit differently, and are stored by default.
_ONE_TOKEN: Mapping[str, Any] = {"max_tokens": 1, "stream": False}
_ONE_TOKEN_OF_RESPONSE: Mapping[str, Any] = {
    "max_output_tokens": 1,
    "stream": False,
    "store": False,
}
_LIST_OF_PROMPTS = re.compile(rb'\s*\[\s*["\[]')
_NOT_FOR_PREFILL = ("stream_options", "min_tokens", "best_of", "background")


class Lender(msgspec.Struct, frozen=True, kw_only=True):
    """Address at which a prefill engine lends the blocks of prompts, as its answers name it.

    Attributes:
        tp_size: Workers of the engine, which listen at successive ports.
    """

    remote_host: Annotated[str, msgspec.Meta(min_length=1)]
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=MAX_PORT)]
    tp_size: Annotated[int, msgspec.Meta(ge=1)] = 1

    @classmethod
    def of(cls, params: msgspec.Raw) -> Self | None:
        """Read the address from the parameters of an answer; None if they have none."""
        try:
            return msgspec.json.decode(params, type=cls)
        except msgspec.ValidationError:
            return None

    def params(self, ticket: str) -> msgspec.Raw:
        """Make the parameters of a decode leg that begins before the prefill leg has ended.

        Args:
            ticket: Name of the lease, the same as in the prefill leg.
        """
        return _raw(
            {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_request_id": ticket,
                "remote_engine_id": "",
                "remote_host": self.remote_host,
                "remote_port": self.remote_port,
                "remote_block_ids": [[0]],
                "tp_size": self.tp_size,
                "transfer_mode": "overlap",
            }
        )


class _Answer(msgspec.Struct):
    """The one field of a prefill engine's answer that matters."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


def params_of_answer(body: bytes) -> msgspec.Raw | None:
    """Find the parameters for the decode leg in a prefill engine's answer; None without them."""
    try:
        params = msgspec.json.decode(body, type=_Answer).kv_transfer_params
        content = bytes(params)
        return params if content.startswith(b"{") and msgspec.json.decode(content) else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class Completion:
    """Request for a completion; only its outermost object is parsed.

    Attributes:
        fields: Values by name, as the client wrote them, but without the parameters of a transfer,
            which only the proxy may set.
        path: Path of the request, which determines what its fields mean.
    """

    fields: Mapping[str, msgspec.Raw]
    path: str

    @classmethod
    def parse(cls, body: bytes, path: str) -> Self:
        """Read the body of a request to a path.

        Raises:
            InvalidArgumentError: The body is not a JSON object.
        """
        try:
            fields = msgspec.json.decode(body.decode(), type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            found = f"{len(body)} bytes"
            raise InvalidArgumentError("body", found, f"a JSON object: {exc}") from exc
        fields.pop(PARAMS, None)
        if EXTRA in fields:
            with contextlib.suppress(msgspec.ValidationError):  # not an object: the engine refuses
                extra = msgspec.json.decode(fields[EXTRA], type=dict[str, msgspec.Raw])
                extra.pop(PARAMS, None)
                fields[EXTRA] = _raw(extra)
        return cls(fields, path)

    @property
    def needs_one_engine(self) -> str:
        """Reason why no prefill engine can help, as a label of a metric; empty if one can.

        The answer to a batch of prompts has the parameters of the first prompt only. A previous
        response is known only to the engine that gave it.
        """
        if bytes(self.fields.get("previous_response_id", b"null")) != b"null":
            return "previous_response"
        return "several_prompts" if self._has_several_prompts else ""

    @property
    def _has_several_prompts(self) -> bool:
        prompt = self.fields.get("prompt")
        if prompt is None or not _LIST_OF_PROMPTS.match(prompt):
            return False
        try:  # decodes no element, and stops at a second one
            msgspec.json.decode(prompt, type=tuple[msgspec.Raw])
        except msgspec.ValidationError:
            return True
        return False

    def prefill_body(self, ticket: str | None = None) -> bytes:
        """Make the body of the prefill leg: one token, no stream, and a request to lend blocks.

        Args:
            ticket: Name of the lease; None lets the engine choose it.
        """
        one_token = _ONE_TOKEN_OF_RESPONSE if self.path == RESPONSES else _ONE_TOKEN
        fields: dict[str, Any] = {**self.fields, **one_token}
        fields |= {name: 1 for name in ("max_completion_tokens", "n") if name in fields}
        for name in _NOT_FOR_PREFILL:
            fields.pop(name, None)
        chosen = {} if ticket is None else {"remote_request_id": ticket}
        return msgspec.json.encode({**fields, PARAMS: {**LEND, **chosen}})

    def decode_body(self, params: msgspec.Raw | None) -> bytes:
        """Make the body of the decode leg.

        Args:
            params: Parameters of the transfer; None lets the engine compute the prompt.
        """
        added = {} if params is None else {PARAMS: params}
        return msgspec.json.encode({**self.fields, **added})


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
