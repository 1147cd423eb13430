"""Weights of a model in memory: their digest, and whether they have changed."""

import json
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import xxhash

from kvxfer import runtime
from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.transformers.module_state import read_state
from kvxfer.runtime import DaemonThreads

MAX_THREADS = 8
MIXING = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9)
"""Odd multipliers that turn places into factors.

Source: SplitMix64, https://doi.org/10.1145/2714064.2660195, without the sign bit.
"""

logger = logging.getLogger(__name__)


class Weights:
    """Weights of a model: parameters, buffers, and the modules that they are in.

    The digest is that of the bytes and of the modules' attributes. Weights that are fine-tuned,
    merged or replaced have another one, as does a model with an adapter or another `scaling`.
    Hashing takes about as long as decoding a token on a CPU. Weights on a GPU are hashed once;
    later, only sums of their rows and columns, which any training changes, are computed there.

    Attributes:
        digest: 32 hexadecimal digits, of the weights at the start.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._threads = min(MAX_THREADS, runtime.num_cores())
        self._kind = self._find_kind()
        self._logged = ""
        self.digest, _ = self._hash(_read)
        self._mark, _ = self._hash(_sum_up)

    def find_change(self) -> str | None:
        """Return the digest of the weights now; empty if they have not changed since the start.

        None while the model has a part that cannot be hashed, such as a hook; the log names it.
        """
        mark, obstacle = self._hash(_sum_up)
        if obstacle:
            return None
        return "" if mark == self._mark else self._hash(_read)[0]

    def _find_kind(self) -> tuple[Any, Any]:
        return getattr(self._model, "dtype", None), getattr(self._model, "device", None)

    def _hash(self, take: Callable[[str, torch.Tensor], bytes]) -> tuple[str, str]:
        """Hash the model, with `take` for each tensor; also name a part that cannot be hashed."""
        state, obstacle = read_state(self._model, take)
        if self._find_kind() != self._kind:
            obstacle = "another data type or device of the model"
        if obstacle and obstacle != self._logged:
            text = "prefixes are neither found nor stored: %s may change keys and values"
            logger.warning(text, obstacle)
        self._logged = obstacle
        names = _tensors(self._model)
        with DaemonThreads("kvxfer-weights", self._threads) as executor:
            parts = executor.map(lambda each: take(each[0][0], each[1]), names)
            whole = xxhash.xxh3_128(json.dumps(state, sort_keys=True).encode())
            for (several, tensor), part in zip(names, parts, strict=True):
                whole.update(f"{' '.join(several)} {tensor.dtype} {tuple(tensor.shape)} ".encode())
                whole.update(part)
        return whole.hexdigest(), obstacle


def _tensors(model: Any) -> list[tuple[list[str], torch.Tensor]]:
    """List parameters and buffers, each tensor once, with all its names."""
    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    for list_named in (model.named_parameters, model.named_buffers):
        for name, tensor in list_named(remove_duplicate=False):
            found.setdefault(id(tensor), ([], tensor.detach()))[0].append(name)
    return list(found.values())


def _read(name: str, tensor: torch.Tensor) -> bytes:
    try:
        flat = tensor.to("cpu").contiguous().flatten()
        data = flat.view(torch.uint8).numpy() if flat.numel() else np.zeros(0, np.uint8)
        return xxhash.xxh3_128_digest(data.data)
    except (NotImplementedError, RuntimeError, TypeError) as exc:
        found = f"{name} on {tensor.device}, a {type(tensor).__name__}"
        raise InvalidArgumentError("model", found, "one whose weights are all in memory") from exc


def _sum_up(name: str, tensor: torch.Tensor) -> bytes:
    """Hash the bytes of a tensor on a CPU; sum up the elements of any other on its device."""
    if tensor.device.type in {"cpu", "meta"} or not tensor.numel():
        return _read(name, tensor)
    return sum_in_place(tensor)


def sum_in_place(tensor: torch.Tensor) -> bytes:
    """Sum up the bits of a tensor by row and by column, and these sums weighted by place.

    Takes two passes over the tensor, on its device, without a copy. The result changes if elements
    change, or elements, rows or columns are exchanged, unless the changes cancel out in every row
    and in every column. Another place in memory does not change it.
    """
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    rows = tensor.contiguous().reshape(-1, tensor.shape[-1] if tensor.ndim else 1)
    bits = rows.view(kinds.get(rows.element_size(), torch.int64))
    sums = [_by_place(bits.sum(dim, dtype=torch.int64)) for dim in (0, 1)]
    return " ".join(str(int(each)) for each in sums).encode()


def _by_place(sums: torch.Tensor) -> torch.Tensor:
    """Sum up integers, each times a factor of its place, modulo 2**64."""
    factors = torch.arange(1, len(sums) + 1, dtype=torch.int64, device=sums.device)
    for multiplier in MIXING:
        factors = factors * multiplier
        factors = factors ^ (factors >> 29)
    return (sums * (factors | 1)).sum()
