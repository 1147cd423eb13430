"""Calls that mypy must reject, each with the code of the error; never run."""

import torch

import kvxfer


def raw_bytes_are_no_key(engine: kvxfer.TransferEngine) -> None:
    engine.submit_store([b"hash"], [[1]])  # E: list-item


def block_ids_come_in_groups(engine: kvxfer.TransferEngine, key: kvxfer.BlockKey) -> None:
    engine.submit_store([key], 1)  # E: arg-type


def a_namespace_is_required(caches: kvxfer.CanonicalKVCaches) -> None:
    kvxfer.connect("host://", caches)  # E: call-arg


def a_namespace_has_known_fields() -> None:
    kvxfer.Namespace(model="m", tensor_parallel=2)  # E: call-arg


def caches_are_named(tensor: torch.Tensor, config: kvxfer.KVCacheConfig) -> None:
    kvxfer.canonicalize([tensor], config)  # E: arg-type


def options_have_names(caches: kvxfer.CanonicalKVCaches) -> None:
    kvxfer.describe(caches, 0, [1], 4)  # E: call-arg


def outcomes_do_not_change(outcome: kvxfer.Outcome) -> None:
    outcome.memory_safe = True  # E: misc


def a_store_is_awaited(engine: kvxfer.TransferEngine, key: kvxfer.BlockKey) -> None:
    engine.store([key], [[1]])[0]  # E: index


class Incomplete(kvxfer.Backend):
    """Backend without any method."""


def a_backend_has_every_method() -> None:
    Incomplete()  # E: abstract
