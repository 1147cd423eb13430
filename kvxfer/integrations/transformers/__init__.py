"""transformers: `PrefixCache` keeps the KV cache of prompts in any backend, for `generate()`."""

from kvxfer.extras import require_extra

require_extra("transformers", "transformers", what="kvxfer.integrations.transformers")
from kvxfer.integrations.transformers.prefix_cache import PrefixCache  # noqa: E402 - its module needs the extra

__all__ = ["PrefixCache"]
