"""transformers: `PrefixCache` keeps the KV cache of prompts in any backend, for `generate()`."""

from kvxfer.extras import needing

with needing("transformers", "transformers", what="kvxfer.integrations.transformers"):
    from kvxfer.integrations.transformers.prefix_cache import PrefixCache
    from kvxfer.integrations.transformers.vllm_pages import VLLMPages, find_vllm_pages

__all__ = ["PrefixCache", "VLLMPages", "find_vllm_pages"]
