"""State of modules: what affects keys and values besides parameters, buffers and configuration.

Attributes are a part of the digest of a model, whatever their names. A part that cannot be hashed,
such as a hook, is an obstacle: while it is there, no page is found or stored.
"""

import copy
import enum
import functools
import os
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as torch_modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from kvxfer.engine_side.harmless_words import PRECISION
from kvxfer.engine_side.weight_files import config_facts, hash_text
from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.transformers.interface import Config, registered_functions
from kvxfer.integrations.transformers.module_code import Unknown, is_known, read_code, where_written

HARMLESS = frozenset({
    # Of every module: weights and hooks, which are read elsewhere; but `training` counts.
    *vars(torch.nn.Module()).keys() - {"training"}, "_compiled_call_impl", "_is_torch_compile",
    # How weights get to the model, are divided among devices and compiled, and the model's name.
    "name_or_path", "loss_type", "loss_function", "hf_device_map", "all_tied_weights_keys",
    "_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan", "_tp_size", "_no_split_modules",
    "_skip_keys_device_placement", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict",
    "_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected",
    "_keys_to_ignore_on_save", "_is_hf_initialized", "is_loaded_in_4bit", "is_loaded_in_8bit",
    "_use_kernels", "use_kernels", "kernel_config", "dynamo_ctx", "get_compiler_config",
    # Noted while the model runs, or checked at each call of `generate()`.
    "generation_config", "warnings_issued", "_output_capturing_hooks_installed",
    # Of every tensor.
    "_is_buffer", "_is_param", "persistent", "_dynamo_static_input_type",
    # How gradients are computed.
    "gradient_checkpointing", "_gradient_checkpointing_func", "_require_grads_hook",
})  # fmt: skip
"""Attributes of modules that do not change keys and values of a model in `eval()`."""
HARMLESS_HOOKS = ("transformers.utils.output_capturing", "transformers.modeling_utils")
"""Python modules whose hooks only record outputs, or ask for gradients."""
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
CALLS = ("__call__", "_wrapped_call_impl", "_call_impl")
"""Functions of torch through which every module is called."""
COMPILED = "_torchdynamo_orig_callable"
"""Attribute of a compiled function with the original."""
DEVICE_HOOK = "accelerate.hooks.AlignDevicesHook"
"""Hook that moves a module's inputs and weights to a device. It keeps addresses of weights."""
ADAPTERS_BY_TOKEN = frozenset({
    "_buffer_dict", "adalora", "adamss", "adaption_prompt", "beft", "boft", "c3a", "deft", "delora",
    "fourierft", "frod", "glora", "gralora", "hira", "hra", "ia3", "ln_tuning", "loha", "lokr",
    "lora", "miss", "mixed", "oft", "peanut", "psoft", "pvera", "randlora", "road", "shira",
    "supertuning", "tinylora", "trainable_tokens", "tuners_utils", "unilora", "vblora", "vera",
    "waveft", "ArrowLinearVariant", "BdLoraLinearVariant", "DoraEmbeddingVariant",
    "DoraLinearVariant", "KasaLinearVariant", "MiCAEmbeddingVariant", "MiCALinearVariant",
    "MontecloraLinearVariant", "QALoraLinearVariant", "VeloraLinearVariant",
})  # fmt: skip
"""PEFT's kinds of adapters, and variants of LoRA, that compute a token's keys and values from it
and earlier ones. Lily averages all tokens; aLoRA begins at the last of its invocations."""
PROCESS = " process"
"""Name in the state for what all modules share; no module has this name."""
MAX_DEPTH = 12
"""Maximum depth of nested objects."""


def read_state(
    model: Any, hash_tensor: Callable[[str, torch.Tensor], bytes]
) -> tuple[dict[str, dict[str, Any]], str]:
    """Read the present state of a model's modules, with tensors that are not parameters.

    Returns:
        The type, code and attributes that count of each module, by its name; and a description of
        the first part that cannot be hashed, empty if there is none.
    """
    hooks = [getattr(torch_modules, name) for name in GLOBAL_HOOKS]
    calls = [where_written(vars(torch.nn.Module)[name])[0] for name in CALLS]
    is_altered = any(hooks) or {*calls} != {torch_modules.__name__}
    state, obstacle = dict[str, dict[str, Any]](), "a hook of all modules" if is_altered else ""
    names = {id(each): name for name, each in model.named_modules()}  # the first of each
    encoder = _Encoder(names, hash_tensor)
    code = functools.cache(encoder.code)
    for name, module in model.named_modules(remove_duplicate=False):
        kind: type = type(module)
        facts = state[name] = {"type": [kind.__module__, kind.__qualname__]}
        if (first := names[id(module)]) != name:
            facts["same as"] = first
            continue
        try:
            facts["code"] = code(kind)
            facts |= encoder.attributes(module)
            _require_known(module)
        except Unknown as exc:
            obstacle = obstacle or f"{exc} of {name or 'the model'}"
    if precision := _precision_of_products(model):
        state[PROCESS] = {"float32 products": precision}
    return state, obstacle


def is_thread_altering(device: torch.device) -> bool:
    """Whether autocast or a mode of torch changes what the calling thread computes on a device.

    Keys and values of such a thread have no name, so they are neither found nor stored.
    """
    modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    modes = [*modes, *_get_current_dispatch_mode_stack()]
    alters = any(not isinstance(mode, DeviceContext) for mode in modes)
    return alters or torch.is_autocast_enabled(torch.device(device).type)


def require_unchanged(model: Any) -> None:
    """Check that the modules are as the configuration makes them: engines' keys name no others."""
    with torch.device("meta"):
        fresh = type(model)(copy.deepcopy(model.config)).eval()
    kinds = {name: type(module) for name, module in model.named_modules()}
    shape_of = lambda _, tensor: str(tuple(tensor.shape)).encode()  # noqa: E731 - without memory
    ours, theirs = (read_state(each, shape_of)[0] for each in (model, fresh))
    for name in sorted(ours.keys() | theirs.keys()):
        mine, plain = ours.get(name, {}), theirs.get(name, {})
        for attribute in sorted(mine.keys() | plain.keys()):
            is_read = attribute in plain or not plain or hasattr(kinds[name], attribute)
            if is_read and mine.get(attribute) != plain.get(attribute):
                found = f"with another {name}.{attribute}".replace(" .", " ")
                wanted = f"a {type(model).__name__} as its configuration makes it, in eval()"
                raise InvalidArgumentError("model", found, wanted)


class _Encoder:
    """Encoder of attributes as JSON types, the same in every process; modules are only named."""

    def __init__(
        self, names: Mapping[int, str], hash_tensor: Callable[[str, torch.Tensor], bytes]
    ) -> None:
        self._names = names
        self._hash_tensor = hash_tensor
        self._configs: dict[int, str] = {}

    def code(self, start: Any) -> dict[str, Any]:
        """Encode the code that runs for a class of modules, or for a function."""
        found = read_code(start)
        return found.names | self._encode_named(found.values)

    def attributes(self, module: Any) -> dict[str, Any]:
        """Encode the attributes that count, of a module and of its tensors, such as scales."""
        owners = [("", module)]
        for list_named in (module.named_parameters, module.named_buffers):
            owners += [(f"{name}.", tensor) for name, tensor in list_named(recurse=False)]
        found = {
            prefix + name: value
            for prefix, owner in owners
            for name, value in dict(getattr(owner, "__dict__", {})).items()
            if name not in HARMLESS
            and not (name == "rope_deltas" and _is_of_one_text(value))
            and not _is_found_anyway(owner, name, getattr(value, COMPILED, value))
        }
        return self._encode_named(found)

    def _encode_named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for name, value in values.items():
            try:
                found[name] = self._encode(value, 0)
            except Unknown as exc:
                raise Unknown(f"attribute {name!r} ({exc})") from exc
        return found

    def _encode(self, value: Any, depth: int) -> Any:
        if value is None or type(value) in {bool, int, float, str}:
            return repr(value) if type(value) is float else value
        if depth > MAX_DEPTH:
            raise Unknown("objects nested too deeply")
        kind = type(value)
        if kind is torch.device or f"{kind.__module__}.{kind.__qualname__}" == DEVICE_HOOK:
            return "device"  # the place of weights does not change them
        if isinstance(value, (bytes, complex, enum.Enum, np.generic, torch.dtype, range)):
            return repr(value)
        if isinstance(value, (list, tuple)):
            return [self._encode(each, depth + 1) for each in value]
        if isinstance(value, (set, frozenset)):
            return sorted(repr(self._encode(each, depth + 1)) for each in value)
        if isinstance(value, Mapping):
            pairs = ((self._encode(name, depth + 1), value[name]) for name in value)
            return sorted([repr(name), self._encode(each, depth + 1)] for name, each in pairs)
        return self._encode_object(value, depth)

    def _encode_object(self, value: Any, depth: int) -> Any:
        if isinstance(value, Config):
            return self._encode_config(value)
        if isinstance(value, np.ndarray) and value.dtype != object:
            value = torch.from_numpy(np.ascontiguousarray(value))
        if isinstance(value, torch.Tensor):
            named = f"{value.dtype} {tuple(value.shape)}"
            return [named, self._hash_tensor("attribute", value.detach()).hex()]
        if id(value) in self._names:
            return ["module", self._names[id(value)]]
        value = getattr(value, COMPILED, value)
        if isinstance(value, functools.partial):
            return ["partial", *(self._encode(e, depth + 1) for e in value.__reduce__()[2][:3])]
        if isinstance(value, types.MethodType):
            own = getattr(type(value.__self__), value.__name__, None) is value.__func__
            function = value.__name__ if own else self._encode_function(value.__func__, depth)
            return ["method", function, self._encode(value.__self__, depth + 1)]
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            return self._encode_function(value, depth)
        if not hasattr(value, "__dict__"):
            raise Unknown(f"a {type(value).__name__}")
        kind = type(value)
        return [kind.__module__, kind.__qualname__, self._encode(vars(value), depth + 1)]

    def _encode_function(self, function: Any, depth: int) -> Any:
        module, name = where_written(function)
        if not is_known(module):
            raise Unknown(f"the function {name} of {module}")
        cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        code = self.code(function) if isinstance(function, types.FunctionType) else {}
        return [module, name, self._encode(cells, depth + 1), code]

    def _encode_config(self, config: Any) -> str:
        """Hash a configuration, each object once: modules mostly share one."""
        if id(config) not in self._configs:
            facts = config_facts(config)
            for name in ("_attn_implementation", "_experts_implementation"):
                if (chosen := getattr(config, name, None)) is not None:
                    try:
                        functions = [self._encode(each, 0) for each in registered_functions(chosen)]
                    except Unknown as exc:
                        raise Unknown(f"{chosen!r}, {exc}") from exc
                    facts[name] = [chosen, functions]
            self._configs[id(config)] = hash_text(repr(sorted(facts.items())))
        return self._configs[id(config)]


def _is_of_one_text(deltas: object) -> bool:
    """Whether the deltas are unset or those of one text; zeros of several texts fit no prompt."""
    return deltas is None or (isinstance(deltas, torch.Tensor) and deltas.tolist() == [[0]])


def _is_found_anyway(owner: Any, name: str, method: object) -> bool:
    """Whether an attribute is the method that its owner, or the module that it wraps, has there."""
    kind: Any = type(owner)
    if not isinstance(method, types.MethodType):
        return False
    if hasattr(kind, name):
        return method.__self__ is owner and getattr(kind, name) is method.__func__
    with suppress(AttributeError):
        return bool(kind.__getattr__(owner, name) == method)
    return False


def draws_at_random(module: Any) -> bool:
    """Whether a module is in training, and its code asks for that, as dropout does."""
    try:
        return module.training and read_code(type(module)).asks_for_training
    except Unknown:  # which `read_state` finds, too
        return False


def _require_known(module: Any) -> None:
    """Check that a module draws nothing at random, and has no hook or unknown adapter of PEFT."""
    if draws_at_random(module):
        raise Unknown("training, where dropout is random,")
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        for hook in list(getattr(module, name).values()):  # another thread may add some
            if getattr(hook, "__module__", None) not in HARMLESS_HOOKS:
                raise Unknown(f"hook {getattr(hook, '__qualname__', type(hook).__name__)!r}")
    adapter = type(module).__module__.partition("peft.tuners.")[2].partition(".")[0]
    variants = [type(each).__name__ for each in vars(module).get("lora_variant", {}).values()]
    for kind in filter(None, (adapter, *variants)):
        if kind not in ADAPTERS_BY_TOKEN:
            raise Unknown(f"the adapter {kind!r}")


def _precision_of_products(model: Any) -> str:
    """Return the precision of float32 products in this process; empty if it does not matter."""
    if getattr(model, "dtype", None) is not torch.float32:
        return ""
    chosen = [
        str(each) for each in sorted(os.environ.items()) if PRECISION.fullmatch(each[0].lower())
    ]
    backends = torch.backends
    of_device: Any = backends.mkldnn if model.device.type == "cpu" else backends.cuda
    matmul = getattr(of_device, "matmul", None)
    places = [getattr(each, "fp32_precision", "") for each in (matmul, of_device, backends)]
    if not any(places):  # a release without these names
        places = [torch.get_float32_matmul_precision()]
    found = next((each for each in places if each not in {"", "none"}), "ieee")
    return " ".join(chosen if found in {"ieee", "highest"} else [str(found), *chosen])
