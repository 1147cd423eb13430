"""Weights of a model on a device: their checksums notice changes, and cost no copy."""

import functools
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")

from kvxfer.errors import InvalidArgumentError  # noqa: E402
from kvxfer.integrations.transformers import weights  # noqa: E402
from kvxfer.integrations.transformers.weights import sum_in_place  # noqa: E402
from tests.integrations.tiny_transformers import (  # noqa: E402
    FAMILIES,
    REFUSED,
    changing,
    fill,
    make_model,
    num_loaded,
    open_cache,
    prompt_of,
)

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.complex64]


def make(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    source = torch.Generator().manual_seed(1)
    size = torch.zeros(shape, dtype=dtype).nbytes
    data = torch.randint(0, 120, (size,), generator=source, dtype=torch.uint8)
    return data.view(dtype).view(shape)


def change_one(flat: torch.Tensor) -> None:
    flat[7] = flat[8].clone()


def exchange_two_far_apart(flat: torch.Tensor) -> None:
    flat[[3, len(flat) - 2]] = flat[[len(flat) - 2, 3]]


def exchange_columns(flat: torch.Tensor) -> None:
    rows = flat.view(-1, 40)
    rows[:] = rows.roll(1, dims=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(12, 40), (3, 4, 40), (40,)], ids=str)
@pytest.mark.parametrize("change", [change_one, exchange_two_far_apart, exchange_columns])
def test_elements_that_change_or_move_are_noticed(
    change: Callable[[torch.Tensor], None], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = make(shape, dtype)
    before = sum_in_place(tensor)
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    change(tensor.view(bits).view(-1))
    assert sum_in_place(tensor) != before


def test_weights_that_moved_hit_and_rows_that_are_exchanged_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_sum_up", lambda _, tensor: sum_in_place(tensor))  # as on a GPU
    model, prompt = make_model(*FAMILIES["llama"]), prompt_of(40)
    with open_cache(model, tmp_path) as cache:
        fill(cache, model, prompt)
        for layer in model.model.layers:  # as after an offload, and back again
            weight: Any = layer.mlp.gate_proj.weight
            weight.data = weight.data.clone()
        assert num_loaded(cache, prompt) == 32
        weight.data[[0, 1]] = weight.data[[1, 0]]
        assert num_loaded(cache, prompt) == 0
        weight.data[[0, 1]] = weight.data[[1, 0]]
        assert num_loaded(cache, prompt) == 32


def test_pages_of_earlier_weights_are_not_taken_for_new_ones_that_another_thread_has_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = make_model(*FAMILIES["llama"]), prompt_of(40)
    with open_cache(model, tmp_path) as cache:
        fill(cache, model, prompt)
        assert num_loaded(cache, prompt) == 32
        model.model.layers[0].mlp.gate_proj.weight.data[0] += 1
        find_prefix, tokens = cache._find_prefix, []

        def find_prefix_and_be_overtaken(*arguments: Any) -> Any:
            past = find_prefix(*arguments)
            monkeypatch.setattr(cache, "_find_prefix", find_prefix)
            other = threading.Thread(
                target=lambda: tokens.append(cache.load(prompt).get_seq_length())
            )
            other.start()
            other.join()
            return past

        monkeypatch.setattr(cache, "_find_prefix", find_prefix_and_be_overtaken)
        assert num_loaded(cache, prompt) == 0
        assert tokens == [0]


def test_hooks_that_are_installed_while_they_are_looked_at_are_no_error(tmp_path: Path) -> None:
    model, prompt = make_model(*FAMILIES["llama"]), prompt_of(40)

    class Hook:
        """Hook of transformers, beside which another thread installs one when it is looked at."""

        def __call__(self, *_: Any) -> None:
            """Note nothing."""

        @property
        def __module__(self) -> str:  # type: ignore[override]
            model.register_forward_hook(Hook())
            return "transformers.utils.output_capturing"

    model.register_forward_hook(Hook())
    with open_cache(model, tmp_path) as cache:
        fill(cache, model, prompt)
        model._forward_hooks.clear()
        assert num_loaded(cache, prompt) == 32


def replace_attention(model: Any) -> None:
    known = transformers.AttentionInterface()["sdpa"]

    def other_attention(*inputs: Any, **settings: Any) -> Any:
        return known(*inputs, **settings)

    transformers.AttentionInterface.register("other_attention", other_attention)
    model.config._attn_implementation = "other_attention"


def test_what_functions_call_in_their_turn_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = make_model(*FAMILIES["llama"]), prompt_of(40)
    model.set_attn_implementation("sdpa")
    modelling = sys.modules[type(model).__module__]
    turn, forward = modelling.apply_rotary_pos_emb, modelling.LlamaMLP.forward
    functional = torch.nn.functional
    of_cohere = transformers.models.cohere.modeling_cohere
    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS

    @functools.wraps(turn)
    def turn_under_its_name(*inputs: Any, **settings: Any) -> Any:
        return turn(*inputs, **settings)

    with open_cache(model, tmp_path) as cache:
        fill(cache, model, prompt)
        for place, name, function in (
            (modelling, "rotate_half", lambda hidden: hidden),
            (modelling, "apply_rotary_pos_emb", of_cohere.apply_rotary_pos_emb),
            (modelling, "apply_rotary_pos_emb", turn_under_its_name),
            (modelling.LlamaMLP, "forward", lambda module, hidden: 2 * forward(module, hidden)),
            (functional, "silu", functional.relu),
            (torch, "rsqrt", lambda hidden: hidden),
            (torch.nn.Module, "_call_impl", lambda module, *inputs: inputs),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(place, name, function)
                assert num_loaded(cache, prompt) == 0, name
                assert cache.store(prompt, transformers.DynamicCache()) == 0
            assert num_loaded(cache, prompt) == 32
        for registry, function in (
            (transformers.AttentionInterface(), modelling.eager_attention_forward),
            (masks, masks["eager"]),
        ):
            with monkeypatch.context() as patch:
                patch.setitem(type(registry)._global_mapping, "sdpa", function)
                assert num_loaded(cache, prompt) == 0
            assert num_loaded(cache, prompt) == 32
        model.set_attn_implementation("eager")
        assert num_loaded(cache, prompt) == 0


MODULE = """
import torch
SCALE = 2.0
SETTINGS = {"shift": 0.0}
def scaled(hidden):
    return hidden * SCALE + SETTINGS["shift"]
class Block(torch.nn.Module):
    FACTOR = 1.0
    def forward(self, hidden, power=1):
        return self.halved(scaled(hidden)) ** power
    def halved(self, hidden):
        return hidden * self.FACTOR / 2
"""


@pytest.mark.parametrize(
    "edit",
    [
        ("SCALE = 2.0", "SCALE = 3.0"),
        ("hidden * SCALE", "hidden / SCALE"),
        ('"shift": 0.0', '"shift": 1.0'),
        ("FACTOR = 1.0", "FACTOR = 2.0"),
        ("self.FACTOR / 2", "self.FACTOR / 3"),
        ("power=1", "power=2"),
    ],
)
def test_code_of_a_model_that_was_edited_is_another_model(
    edit: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(40)
    for code, expected in ((MODULE, 0), (MODULE, 32), (MODULE.replace(*edit), 0)):
        model = make_model(*FAMILIES["llama"])
        module: Any = ModuleType("block_of_its_own")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(code, vars(module))  # noqa: S102 - as a model's own code is
        model.model.layers[0].mlp = module.Block()
        with open_cache(model, tmp_path) as cache:
            assert num_loaded(cache, prompt) == expected
            fill(cache, model, prompt)
            module.SETTINGS["shift"] += 1.0
            assert num_loaded(cache, prompt) == 0


ADAPTER = """
import torch
class Variant:
    pass
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lora_variant = {"default": Variant()} if Variant.__name__ else {}
    def forward(self, hidden):
        return hidden
"""


@pytest.mark.parametrize(
    ("kind", "variant", "expected"),
    [("lora", "DoraLinearVariant", 32), ("lora", "ALoraLinearVariant", 0), ("lily", "", 0)],
)
def test_adapters_of_peft_have_pages_if_later_tokens_do_not_change_them(
    kind: str, variant: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by its wrong tokens: aLoRA begins at the last call for it, Lily averages all tokens."""
    model, prompt = make_model(*FAMILIES["llama"]), prompt_of(40)
    module: Any = ModuleType(f"peft.tuners.{kind}.layer")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(ADAPTER, vars(module))  # noqa: S102 - as PEFT's own code is
    module.Variant.__name__ = variant
    model.model.layers[0].mlp = module.Layer()
    with open_cache(model, tmp_path) as cache:
        fill(cache, model, prompt)
        assert num_loaded(cache, prompt) == expected


class Doubled(torch.nn.Module):
    """Block that computes by a method."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.change(hidden)

    def change(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * hidden


class Heir(Doubled):
    """Block that inherits the method."""


def test_a_method_that_a_class_no_longer_inherits_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = make_model(*FAMILIES["llama"]), prompt_of(40)
    model.model.layers[0].mlp = Heir()
    with open_cache(model, tmp_path) as cache:
        fill(cache, model, prompt)
        with monkeypatch.context() as patch:
            patch.setattr(Heir, "change", lambda _, hidden: 3 * hidden)
            assert num_loaded(cache, prompt) == 0
        assert num_loaded(cache, prompt) == 32


def change_data(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight.data[5, 7] += 1  # which no version counter sees


class LowRank(torch.nn.Module):
    """Layer with an adapter that can be switched off, as those of PEFT."""

    def __init__(self, base_layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = torch.nn.Linear(base_layer.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, base_layer.out_features, bias=False)
        self.active_adapters, self.disable_adapters = ["default"], False

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.base_layer(states)
        return output if self.disable_adapters else output + self.up(self.down(states))


def add_adapter(model: Any) -> None:
    layer = model.model.layers[0].self_attn
    layer.v_proj = LowRank(layer.v_proj)


@pytest.mark.parametrize(
    "change",
    [
        changing("config.rms_norm_eps", 0.5),
        change_data,
        lambda model: model.model.rotary_emb.inv_freq.mul_(1.01),
        add_adapter,
        changing("model.layers.0.mlp.up_proj.weight.scale", torch.ones(4)),  # as for quantization
        changing("model.layers.0.self_attn.scaling", 1.0),
        changing("model.layers.1.steering", [{"vectors": (torch.ones(4),)}]),
        changing("model.layers.1.steering", SimpleNamespace(strength=0.5)),
        lambda model: model.model.layers[0].register_forward_hook(lambda _, __, hidden: 2 * hidden),
        changing("model.layers.0.mlp.forward", lambda hidden: hidden),
        replace_attention,
    ],
)
def test_changes_of_a_model_are_noticed_in_this_cache_and_in_one_opened_later(
    change: Callable[[Any], None], tmp_path: Path
) -> None:
    model, prompt = make_model(*FAMILIES["llama"]), prompt_of(40)
    with open_cache(model, tmp_path) as cache:
        fill(cache, model, prompt)
        before = cache.load(prompt)
        assert before.get_seq_length() == 32
        change(model)
        assert num_loaded(cache, prompt) == 0
        assert cache.store(prompt, before) == 0
    with open_cache(model, tmp_path) as cache:
        assert num_loaded(cache, prompt) == 0
    with open_cache(make_model(*FAMILIES["llama"]), tmp_path) as cache:
        assert num_loaded(cache, prompt) == 32


class Tuner(torch.nn.Module):
    """Wrapper of a model that passes attributes through, as that of PEFT."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
        return self.model(input_ids=input_ids, **others)


@pytest.mark.parametrize("wrap", [Tuner, functools.partial(torch.compile, backend="eager")])
def test_positions_of_generate_are_compared_in_a_wrapped_model_too(
    wrap: Callable[[Any], Any], tmp_path: Path
) -> None:
    config_class, settings, reason = REFUSED["roberta"]
    with pytest.raises(InvalidArgumentError, match=re.escape(reason)):
        open_cache(wrap(make_model(config_class, settings)).eval(), tmp_path)


def test_a_method_that_is_noted_where_it_is_found_anyway_changes_nothing() -> None:
    """Found by its misses: PEFT's `generate()` leaves such a note behind."""
    model = Tuner(make_model(*FAMILIES["llama"]))
    name = "prepare_inputs_for_generation"
    before = weights.Weights(model)
    setattr(model, name, getattr(model, name))
    assert weights.Weights(model).digest == before.digest
    assert before.find_change() == ""
    setattr(model, name, model.model.save_pretrained)
    assert before.find_change()


def switch_off(model: Any) -> None:
    model.model.layers[0].self_attn.v_proj.disable_adapters ^= True


def use_the_weight_of_another_layer(model: Any) -> None:
    first, second, *_ = (each.self_attn.q_proj for each in model.model.layers)
    first.weight, second.weight = second.weight, first.weight


@pytest.mark.parametrize("exchange", [switch_off, use_the_weight_of_another_layer])
def test_what_is_taken_back_is_found_again(exchange: Callable[[Any], None], tmp_path: Path) -> None:
    model, prompt = make_model(*FAMILIES["llama"]), prompt_of(40)
    add_adapter(model)
    with open_cache(model, tmp_path) as cache:
        fill(cache, model, prompt)
        exchange(model)
        assert num_loaded(cache, prompt) == 0
        exchange(model)
        assert num_loaded(cache, prompt) == 32


def test_a_hook_is_named_once_and_pages_are_found_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, prompt = make_model(*FAMILIES["llama"]), prompt_of(40)
    with open_cache(model, tmp_path) as cache:
        fill(cache, model, prompt)
        handle = model.model.norm.register_forward_hook(lambda *_: None)
        assert fill(cache, model, prompt_of(40, seed=1)) == 0
        assert caplog.text.count("<lambda>' of model.norm may change keys and values") == 1
        handle.remove()
        assert num_loaded(cache, prompt) == 32
        assert num_loaded(cache, prompt_of(40, seed=1)) == 0
        model.generate(prompt, max_new_tokens=2, output_hidden_states=True)  # by hooks of its own
        assert num_loaded(cache, prompt) == 32


class HalvedProducts(TorchFunctionMode):
    """Mode of a thread that alters what functions of torch return."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 0.5 if function is torch.nn.functional.linear else result


class PassedOn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode below the functions of torch, which may alter anything as far as kvxfer knows."""

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "otherwise",
    [lambda: torch.autocast("cpu", dtype=torch.bfloat16), HalvedProducts, PassedOn],
    ids=["autocast", "function mode", "dispatch mode"],
)
def test_a_thread_that_computes_otherwise_neither_finds_nor_stores(
    otherwise: Callable[[], Any], tmp_path: Path
) -> None:
    model, prompt = make_model(*FAMILIES["llama"]), prompt_of(40)
    with open_cache(model, tmp_path) as cache:
        fill(cache, model, prompt)
        with otherwise():
            assert num_loaded(cache, prompt) == 0
            assert fill(cache, model, prompt_of(40, seed=1)) == 0
            with open_cache(model, tmp_path) as opened_within:
                assert num_loaded(opened_within, prompt) == 0
        with torch.device("cpu"):  # a mode of torch, too, which says where tensors are made
            assert num_loaded(cache, prompt) == 32
        assert num_loaded(cache, prompt_of(40, seed=1)) == 0


def test_a_precision_of_products_that_a_variable_chooses_is_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries below torch read it, and torch does not know."""
    model, prompt = make_model(*FAMILIES["llama"]), prompt_of(40)
    for value, num_found in (("BF16", 0), ("BF16", 32), ("ANY", 0)):
        monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", value)
        with open_cache(model, tmp_path) as cache:
            assert num_loaded(cache, prompt) == num_found
            fill(cache, model, prompt)


def test_another_precision_of_products_is_another_model(tmp_path: Path) -> None:
    model, prompt = make_model(*FAMILIES["llama"]), prompt_of(40)
    with open_cache(model, tmp_path) as cache:
        fill(cache, model, prompt)
        torch.set_float32_matmul_precision("medium")
        try:
            assert num_loaded(cache, prompt) == 0
            with open_cache(model, tmp_path) as opened_since:
                assert num_loaded(opened_since, prompt) == 0
                fill(opened_since, model, prompt)
                assert num_loaded(opened_since, prompt) == 32
            halved = make_model(*FAMILIES["llama"]).bfloat16()  # has no products of that kind
            digest = weights.Weights(halved).digest
        finally:
            torch.set_float32_matmul_precision("highest")
        assert weights.Weights(halved).digest == digest
        assert num_loaded(cache, prompt) == 32


def test_a_compiled_model_finds_the_pages_of_the_plain_one(tmp_path: Path) -> None:
    """Found by its misses: its first call marks parameters, as is done here."""
    model, prompt = make_model(*FAMILIES["llama"]), prompt_of(40)
    with open_cache(model, tmp_path) as cache:
        fill(cache, model, prompt)
        for each in model.parameters():
            torch._dynamo.mark_static_address(each, guard=False)
        assert num_loaded(cache, prompt) == 32
    with open_cache(torch.compile(model, backend="eager"), tmp_path) as cache:
        assert num_loaded(cache, prompt) == 32
        model.forward = torch.compile(model.forward, backend="eager")
        assert num_loaded(cache, prompt) == 32
        model.forward = torch.compile(model.model.forward, backend="eager")
        assert num_loaded(cache, prompt) == 0


def test_a_hook_of_a_wrapper_around_a_compiled_model_is_noticed() -> None:
    compiled: Any = torch.compile(make_model(*FAMILIES["llama"]), backend="eager")
    model = Tuner(compiled)
    found = weights.Weights(model)
    assert found.find_change() == ""
    model.register_forward_pre_hook(lambda *_: None)
    assert found.find_change() is None


def test_a_model_that_is_divided_among_devices_has_one_digest() -> None:
    """Found by its misses: hooks of accelerate note where tied weights lie in memory."""
    accelerate = pytest.importorskip("accelerate")
    name, settings = FAMILIES["llama"]
    models = [make_model(name, {**settings, "tie_word_embeddings": True}) for _ in range(2)]
    for model in models:
        accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    one, other = (weights.Weights(model).digest for model in models)
    assert one == other
