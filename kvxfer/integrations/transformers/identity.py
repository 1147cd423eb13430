"""Identity of a model in transformers: the namespace of pages that are found again."""

import json
from typing import Any

from kvxfer.engine_side.weight_files import config_facts, hash_text
from kvxfer.integrations.transformers.weights import Weights
from kvxfer.storage.keys import Namespace


def model_namespace(model: Any, weights: Weights, revision: str) -> Namespace:
    """Make the namespace of pages: of the weights in memory, wherever they came from.

    Args:
        model: The model.
        weights: Its weights.
        revision: Revision that the caller calls them, empty for none.
    """
    return Namespace(
        model=type(model).__name__,
        revision=f"{revision} weights {weights.digest}".strip(),
        dtype=str(model.dtype).removeprefix("torch."),
        config_hash=hash_config(model.config),
    )


def hash_config(config: Any) -> str:
    """Hash what may change keys and values of a configuration as it is now."""
    return hash_text(json.dumps(config_facts(config), sort_keys=True))
