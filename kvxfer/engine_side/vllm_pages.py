"""vLLM's pages: the namespace in which vLLM stores them, and a proof that it has our weights.

For engines that run a model of transformers; imported only by them, since it needs transformers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from numpy.typing import ArrayLike
from safetensors import safe_open
from transformers.utils import cached_file

from kvxfer.backends.file import BlockTree, FileConfig
from kvxfer.connect import BackendChoice, backend_choices, complete_namespace, parse_backend
from kvxfer.engine_side.vllm_keys import VLLMKeys
from kvxfer.engine_side.weight_files import config_facts, find_weights_revision
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.canonical import CanonicalKVCaches
from kvxfer.kvcache.portable import PageMapping
from kvxfer.storage.keys import BlockKey, Namespace
from kvxfer.storage.portable_backend import portable_namespace

PLAIN = ("", "weights None, cache auto")
"""`quantization` of vLLM's namespaces if neither weights nor caches are quantized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMPages:
    """Pages of vLLM: namespace, tokens of a page, order of the axes by part, and keys."""

    namespace: Namespace
    tokens_per_page: int
    axes: Mapping[str, tuple[str, ...]]
    keys: VLLMKeys

    @property
    def namespace_of_model(self) -> Namespace:
        """The namespace without its groups, which follow from our caches."""
        return msgspec.structs.replace(self.namespace, groups=())

    def page_keys(self, tokens: ArrayLike) -> list[BlockKey]:
        """Compute the keys of all whole pages of a prompt; see `VLLMKeys.chunk_keys`."""
        return self.keys.chunk_keys(tokens, tokens_per_chunk=self.tokens_per_page)

    def require_same_pages(
        self, caches: CanonicalKVCaches, mappings: Sequence[PageMapping]
    ) -> None:
        """Check that the pages of our caches are those of vLLM in every byte."""
        complete = complete_namespace(self.namespace_of_model, caches, 1)
        self.namespace.require_same(portable_namespace(complete, mappings))


def find_vllm_pages(
    model: Any,
    backend: BackendChoice | Sequence[BackendChoice],
    keys: VLLMKeys,
    *,
    revision: str = "",
    fingerprint: str = "",
) -> VLLMPages:
    """Find the namespace in which vLLM stores pages of these weights.

    vLLM identifies its weights by their files or commit. So the model in memory is compared with
    these files, tensor by tensor.

    One tier of `backend` must be the file store that vLLM has opened. `revision` is that of vLLM's
    arguments, and `fingerprint` chooses among several namespaces of these weights.
    """
    path = str(model.config.name_or_path)
    commit = getattr(model.config, "_commit_hash", None) or ""
    wanted = find_weights_revision(path, revision=revision, commit=commit)
    dtype = str(model.dtype).removeprefix("torch.")
    configs = [parse_backend(choice)[1] for choice in backend_choices(backend)]
    folders = [Path(each.path) for each in configs if isinstance(each, FileConfig)]
    stored = [n for each in folders if each.is_dir() for n in BlockTree(each).namespaces()]
    found = [
        each
        for each in stored
        if (each.revision, each.dtype) == (wanted, dtype)
        and each.quantization in PLAIN
        and fingerprint in {"", each.fingerprint}
    ]
    if len(found) != 1:
        there = [
            f"{each.fingerprint} (revision {each.revision}, {each.dtype}, {each.quantization})"
            for each in stored
        ]
        rule = (
            f"a store with one namespace of revision {wanted!r} and {dtype}, not quantized and "
            "without --hf-overrides or settings that choose weights, which vLLM has opened before"
        )
        raise InvalidArgumentError("backend", backend, f"{rule}; it has {there or 'none'}")
    _require_weights_of_files(model, path, commit or revision)
    return _read_pages(found[0], keys)


def _read_pages(namespace: Namespace, keys: VLLMKeys) -> VLLMPages:
    """Read the format of a namespace's pages: tokens, and axis order of keys and values."""
    expected = "pages of one KV-cache group, with keys and values by name"
    if len(namespace.groups) != 1:
        raise InvalidArgumentError("namespace", f"{len(namespace.groups)} groups", expected)
    (group,) = namespace.groups
    axes: dict[str, tuple[str, ...]] = {}
    sizes: set[int] = set()
    for tensor, layout in zip(group.tensors, group.layouts, strict=False):
        order, part = tuple(layout.split()), tensor.name.rpartition(".")[2]
        if sorted(order) != ["dim", "head", "token"] or axes.setdefault(part, order) != order:
            raise InvalidArgumentError("namespace", f"{tensor.name}: {layout}", expected)
        sizes.add(tensor.shape[order.index("token")])
    if len(sizes) != 1 or axes.keys() != {"k", "v"}:
        raise InvalidArgumentError("namespace", sorted(axes), expected)
    return VLLMPages(namespace=namespace, tokens_per_page=sizes.pop(), axes=axes, keys=keys)


def _require_weights_of_files(model: Any, path: str, revision: str) -> None:
    """Check that configuration and parameters in memory are those of the files that vLLM loads."""
    ours = config_facts(model.config)
    theirs = config_facts(type(model.config).from_pretrained(path, revision=revision or "main"))
    if ours != theirs:
        names = ours.keys() | theirs.keys()
        differs = sorted(name for name in names if ours.get(name) != theirs.get(name))
        found = f"a configuration that differs in {', '.join(differs)}"
        raise InvalidArgumentError("model", found, f"the configuration of {path}")
    expected = f"the weights of {path}, which vLLM loads, unchanged and without adapters"
    left = {name: tensor.detach() for name, tensor in model.named_parameters()}
    for file in _weight_files(path, revision):
        with safe_open(file, framework="pt") as stored:
            for name in left.keys() & set(stored.keys()):
                tensor = left.pop(name)
                same = stored.get_tensor(name).to(tensor.device, tensor.dtype)
                if not torch.equal(same, tensor):
                    raise InvalidArgumentError("model", f"one that differs in {name}", expected)
    if left:
        found = f"one with {min(left)}, which is in no file"
        raise InvalidArgumentError("model", found, expected)


def _weight_files(path: str, revision: str) -> list[Path]:
    def find(name: str) -> Path | None:
        place = cached_file(
            path, name, revision=revision or "main", _raise_exceptions_for_missing_entries=False
        )
        return Path(place) if place else None

    names = {"model.safetensors"}
    if index := find("model.safetensors.index.json"):
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    files = [found for name in sorted(names) if (found := find(name))]
    if not files:
        raise InvalidArgumentError("model", path, "a folder or repository with safetensors files")
    return files
