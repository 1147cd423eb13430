"""transformers: `PrefixCache` keeps the KV cache of prompts in any backend, for `generate()`."""

from kvxfer.extras import needing

with needing("transformers", "transformers", what="kvxfer.integrations.transformers"):
    from kvxfer.integrations.transformers.prefix_cache import PrefixCache

__all__ = ["PrefixCache"]
