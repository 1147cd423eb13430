"""Registered caches: tensors that an engine registered, checked and matched with their layouts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvxfer.checks import require_instance, require_sequence
from kvxfer.errors import InvalidArgumentError, UnknownLayoutError
from kvxfer.kvcache.config import KVCacheConfig
from kvxfer.kvcache.layout import (
    CacheTensorForm,
    KVLayout,
    LayoutReading,
    describe_tensor,
    fitting_readings,
    parse_layout_of,
    require_one,
)
from kvxfer.kvcache.spec import KVCacheSpec

KVCaches = Mapping[str, torch.Tensor | Sequence[torch.Tensor]]
Layouts = Mapping[str, str | KVLayout | Sequence[str | KVLayout]]
"""Layouts by layer: one for all tensors of a layer, or one for each of them."""


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Layer and the group that it belongs to."""

    group: int
    layer_name: str


@dataclass(frozen=True, slots=True)
class RegisteredCache:
    """Registered entry: its tensors, their layouts, and the layers whose pages they hold.

    Attributes:
        name: Name under which it was registered.
        positions: Layers at each index of the layer axis; a tensor without one has one position.
            Layers of different groups may share a position.
    """

    name: str
    spec: KVCacheSpec
    tensors: tuple[torch.Tensor, ...]
    forms: tuple[CacheTensorForm, ...]
    readings: tuple[LayoutReading, ...]
    positions: tuple[tuple[LayerPlace, ...], ...]


def read_registered(
    kv_caches: KVCaches, config: KVCacheConfig, layouts: Layouts | None
) -> list[RegisteredCache]:
    """Find the layout of each tensor, in group and layer order; raises as `canonicalize` does."""
    require_instance("kv_caches", kv_caches, Mapping)
    require_instance("config", config, KVCacheConfig)
    if not kv_caches:
        raise InvalidArgumentError("kv_caches", kv_caches, "layer names and their tensors")
    layouts = {} if layouts is None else layouts
    require_instance("layouts", layouts, Mapping)
    for name in layouts:
        if name not in kv_caches:
            raise InvalidArgumentError("layouts", name, f"one of {list(kv_caches)}")
    _require_usable_tensors(kv_caches)
    cross_layer = _read_cross_layer(kv_caches, config, layouts)
    if cross_layer is not None:
        return [cross_layer]
    if missing := sorted(set(config.layer_names) - kv_caches.keys()):
        raise InvalidArgumentError("kv_caches", list(kv_caches), f"also the layers {missing}")
    if unknown := sorted(kv_caches.keys() - set(config.layer_names), key=str):
        raise InvalidArgumentError("kv_caches", unknown, "only layers of the groups")
    return [
        _read_layer(kv_caches[name], LayerPlace(index, name), config, layouts)
        for index, group in enumerate(config.groups)
        for name in group.layer_names
    ]


def as_tensors(entry: torch.Tensor | Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """List the tensors of one registered entry."""
    return (entry,) if isinstance(entry, torch.Tensor) else tuple(entry)


def _require_usable_tensors(kv_caches: KVCaches) -> None:
    devices = set()
    for name, entry in kv_caches.items():
        argument = f"kv_caches[{name!r}]"
        if not isinstance(entry, torch.Tensor):
            require_instance(argument, entry, Sequence)
        for tensor in as_tensors(entry):
            require_instance(argument, tensor, torch.Tensor)
            if tensor.layout != torch.strided or tensor.device.type == "meta":
                raise InvalidArgumentError(
                    argument, f"{tensor.layout} on {tensor.device}", "a strided tensor with memory"
                )
            if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
                view = "conjugated" if tensor.is_conj() else "negated"
                view = "quantized" if tensor.is_quantized else view
                found = f"a {view} view of {describe_tensor(tensor)}"
                raise UnknownLayoutError(name, found, ["a tensor whose bytes are its elements"])
            devices.add(tensor.device)
    if len(devices) > 1:
        raise InvalidArgumentError("kv_caches", sorted(map(str, devices)), "tensors on one device")


def _read_layer(
    entry: torch.Tensor | Sequence[torch.Tensor],
    place: LayerPlace,
    config: KVCacheConfig,
    layouts: Layouts,
) -> RegisteredCache:
    name, tensors = place.layer_name, as_tensors(entry)
    spec = config.groups[place.group].spec.for_layer(name)
    forms = _forms(tensors, spec, name)
    readings = []
    given = _layouts_of_tensors(name, layouts.get(name), forms)
    for tensor, form, layout in zip(tensors, forms, given, strict=True):
        padded = spec.page_size_bytes if len(forms) == 1 else None
        found = fitting_readings(
            tensor, form, config.num_blocks, layout=layout, page_size_bytes=padded
        )
        readings.append(require_one(found, tensor, form, config.num_blocks, name, layout=layout))
    return RegisteredCache(name, spec, tensors, forms, tuple(readings), ((place,),))


def _layouts_of_tensors(
    name: str,
    layout: str | KVLayout | Sequence[str | KVLayout] | None,
    forms: Sequence[CacheTensorForm],
) -> list[KVLayout | None]:
    if layout is None:
        return [None] * len(forms)
    argument, expected = f"layouts[{name!r}]", f"a layout, or one for each of {len(forms)} tensors"
    is_one = isinstance(layout, (str, KVLayout))
    given: Any = [layout] * len(forms) if is_one else layout
    require_sequence(argument, given, expected)
    if len(given) != len(forms):
        raise InvalidArgumentError(argument, layout, expected)
    if is_one and len({form.layouts for form in forms}) > 1:
        raise InvalidArgumentError(argument, layout, "one per tensor: they differ")
    return [
        None if each is None else parse_layout_of(form, each, name=argument)
        for each, form in zip(given, forms, strict=True)
    ]


def _forms(
    tensors: Sequence[torch.Tensor], spec: KVCacheSpec, layer_name: str
) -> tuple[CacheTensorForm, ...]:
    whole, separate = spec.cache_tensors, spec.separate_cache_tensors
    for forms in (whole, separate):
        if len(tensors) == len(forms):
            return forms
    counts = f"{len(whole)} or {len(separate)}" if separate else str(len(whole))
    found, expected = f"{len(tensors)} tensors", f"{counts} for a {type(spec).__name__}"
    raise InvalidArgumentError(f"kv_caches[{layer_name!r}]", found, expected)


def _read_cross_layer(
    kv_caches: KVCaches, config: KVCacheConfig, layouts: Layouts
) -> RegisteredCache | None:
    """Read the entries as one tensor of all layers, or return None if they are not one.

    Such a tensor is registered once, under any name, or once per layer.
    """
    name, entry = next(iter(kv_caches.items()))
    positions = _layer_positions(config)
    if positions is None or not _is_one_tensor(kv_caches, config):
        return None
    spec = config.groups[0].spec.for_layer(config.groups[0].layer_names[0])
    if len(spec.cache_tensors) != 1 or not _same_pages(spec, config):
        return None
    (tensor,), (form,) = as_tensors(entry), spec.cache_tensors
    texts = {at: each for at, each in layouts.items() if each is not None}  # type: ignore[redundant-expr]
    given = {" ".join(str(each).split()): at for at, each in texts.items()}
    several = any(not isinstance(each, (str, KVLayout)) for each in texts.values())
    if several or any("layer" not in each.split() for each in given):
        return None  # the layouts are those of single layers' tensors
    if len(given) > 1:
        raise InvalidArgumentError("layouts", layouts, "one layout for the tensor of all layers")
    layout = None
    for text, at in given.items():
        argument = f"layouts[{at!r}]"
        layout = parse_layout_of(form, text, name=argument, num_layers=len(positions))
    found = fitting_readings(
        tensor,
        form,
        config.num_blocks,
        layout=layout,
        num_layers=len(positions),
        page_size_bytes=spec.page_size_bytes,
    )
    if not found and layout is None:
        return None
    if layout is None and len(positions) == 1 and name in config.layer_names:
        plain = fitting_readings(
            tensor, form, config.num_blocks, page_size_bytes=spec.page_size_bytes
        )
        if plain:
            return None
    reading = require_one(
        found, tensor, form, config.num_blocks, name, layout=layout, num_layers=len(positions)
    )
    return RegisteredCache(name, spec, (tensor,), (form,), (reading,), positions)


def _layer_positions(config: KVCacheConfig) -> tuple[tuple[LayerPlace, ...], ...] | None:
    """List the layers at each index of a layer axis; None if unknown."""
    groups = {name: i for i, group in enumerate(config.groups) for name in group.layer_names}
    if sum(map(len, config.layer_positions)) != len(groups):
        return None
    return tuple(
        tuple(LayerPlace(groups[name], name) for name in names) for names in config.layer_positions
    )


def _is_one_tensor(kv_caches: KVCaches, config: KVCacheConfig) -> bool:
    """Whether all entries are the same tensor, registered once or for every layer."""
    entries = [as_tensors(entry) for entry in kv_caches.values()]
    if any(len(tensors) != 1 for tensors in entries):
        return False
    places = {(t.data_ptr(), t.shape, t.stride(), t.dtype) for (t,) in entries}
    covers_all = len(entries) == 1 or kv_caches.keys() == set(config.layer_names)
    return len(places) == 1 and covers_all


def _same_pages(spec: KVCacheSpec, config: KVCacheConfig) -> bool:
    specs = [g.spec.for_layer(name) for g in config.groups for name in g.layer_names]
    return all(
        each.cache_tensors == spec.cache_tensors and each.page_size_bytes == spec.page_size_bytes
        for each in specs
    )
