"""Layout zoo: the KV-cache layouts of engines, release by release. Data only."""

from kvxfer.engine_side.engine_layout import EngineLayout
from kvxfer.engine_side.vllm_layouts import VLLM_LAYOUTS

SGLANG_LAYOUTS = (
    EngineLayout(
        engine="SGLang",
        releases="as of November 2026",
        name="Device pool, MHA token slots, NHD",
        shape="block*token head dim",
        memory="block*token head dim",
        allocations="layer kv",
        note="A list of keys and one of values, a tensor for each layer; the first page is padding "
        "and counts as a block. Register (keys, values) under the name of a layer.",
    ),
    EngineLayout(
        engine="SGLang",
        releases="as of November 2026",
        name="Device pool, MHA pages, HND",
        shape="block head token dim",
        memory="block head token dim",
        allocations="layer kv",
    ),
    EngineLayout(
        engine="SGLang",
        releases="as of November 2026",
        name="Device pool, MLA token slots",
        shape="block*token head dim",
        memory="block*token head dim",
        allocations="layer",
        content="latents",
        note="One head.",
    ),
    EngineLayout(
        engine="SGLang",
        releases="as of November 2026",
        name="Device pool, Mamba states",
        shape="block",
        memory="layer block",
        allocations="state",
        content="states",
        note="Each convolution state and the temporal one is an allocation of all layers.",
    ),
    EngineLayout(
        engine="SGLang",
        releases="as of November 2026",
        name="Host pool, layer_first",
        shape="kv layer block*token head dim",
        memory="kv layer block*token head dim",
    ),
    EngineLayout(
        engine="SGLang",
        releases="as of November 2026",
        name="Host pool, page_first",
        shape="kv block*token layer head dim",
        memory="kv block*token layer head dim",
    ),
    EngineLayout(
        engine="SGLang",
        releases="as of November 2026",
        name="Host pool, page_first_direct",
        shape="kv block layer token head dim",
        memory="kv block layer token head dim",
    ),
    EngineLayout(
        engine="SGLang",
        releases="as of November 2026",
        name="Host pool, page_head",
        shape="kv block head token layer dim",
        memory="kv block head token layer dim",
    ),
    EngineLayout(
        engine="SGLang",
        releases="as proposed in September 2026",
        name="Host pool, page_unified",
        shape="block layer kv token head dim",
        memory="block layer kv token head dim",
        note="With one group of heads; a page with several has one such piece for each.",
    ),
    EngineLayout(
        engine="SGLang",
        releases="as of November 2026",
        name="Host pool, layer_first, MLA",
        shape="layer block*token head dim",
        memory="layer block*token head dim",
        content="latents",
    ),
    EngineLayout(
        engine="SGLang",
        releases="as of November 2026",
        name="Host pool, page_first, MLA",
        shape="block*token layer head dim",
        memory="block*token layer head dim",
        content="latents",
    ),
    EngineLayout(
        engine="SGLang",
        releases="as of November 2026",
        name="Host pool, page_first_direct, MLA",
        shape="block layer token head dim",
        memory="block layer token head dim",
        content="latents",
    ),
)

TRANSFORMERS_LAYOUTS = (
    EngineLayout(
        engine="transformers",
        releases="5",
        name="DynamicLayer",
        shape="head block*token dim",
        memory="head block*token dim",
        allocations="layer kv",
        note="Of one sequence of the batch, keys[i]. Tokens have no pages, so blocks are what the "
        "tokens are cut into; every forward pass makes new tensors.",
    ),
    EngineLayout(
        engine="transformers",
        releases="5",
        name="StaticLayer",
        shape="head block*token dim",
        memory="head block*token dim",
        allocations="layer kv",
        note="Of one sequence of the batch. The tensors stay where they are.",
    ),
    EngineLayout(
        engine="transformers",
        releases="5",
        name="DynamicSlidingWindowLayer",
        shape="head block*token dim",
        memory="head block*token dim",
        allocations="layer kv",
        note="Of one sequence of the batch: the last window - 1 tokens of a longer tensor, so "
        "heads are further apart than their tokens.",
    ),
)

TENSORRT_LLM_LAYOUTS = (
    EngineLayout(
        engine="TensorRT-LLM",
        releases="1",
        name="Pool",
        shape="block layer kv head token dim",
        memory="block layer kv head token dim",
    ),
)

LAYOUT_ZOO = (*VLLM_LAYOUTS, *SGLANG_LAYOUTS, *TRANSFORMERS_LAYOUTS, *TENSORRT_LLM_LAYOUTS)
"""Every engine's layout that is known to kvxfer.

Source: vLLM's packages 0.20 to 0.32, and its threads 27743 (blocks of all layers), 44455 (packed
K/V) and 42082 (the six names); SGLang's `mem_cache/memory_pool.py` and `mem_cache/pool_host`, and
its pull request 39727; `transformers/cache_utils.py` of 5.16; TensorRT-LLM's KV-cache manager.
"""
