"""Weight files: a checkpoint's revision by its files, the same for all engines of a machine."""

import json
from pathlib import Path
from typing import Any

import xxhash

OF_NO_VALUE = ("_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype")
"""Configuration fields that say where a model came from, or that a namespace has itself."""
WEIGHT_SUFFIXES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json"),
    *("quant_config.json", "quantize_config.json", "quant_cfg.json", ".py"),
)
"""Name suffixes of files that determine what is computed, besides `config.json`: weights,
quantization settings, and the model's own code."""


def find_weights_revision(path: str, *, revision: str = "", commit: str = "") -> str:
    """Find the revision of the weights: a commit, the caller's `revision`, or a hash of files.

    Files of a local folder, and of its parts with a `config.json`, are hashed by size and time: a
    copy is another revision, unless `revision` is given. Empty if nothing identifies the weights.
    """
    place = Path(path)
    if not path or not place.exists():
        return commit or revision
    if revision:
        return revision
    folders = [place, *(config.parent for config in place.glob("*/config.json"))]
    files = sorted(file for folder in folders for file in folder.glob("*")) or [place]
    weights = [file for file in files if file.name.endswith(WEIGHT_SUFFIXES) and file.exists()]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weights]
    return hash_text(json.dumps(stats)) if stats else ""


def config_facts(config: Any) -> dict[str, Any]:
    """Collect fields of a transformers configuration that may change keys and values, as JSON."""
    facts = {key: value for key, value in config.to_dict().items() if key not in OF_NO_VALUE}
    return json.loads(json.dumps(facts, default=str))  # type: ignore[no-any-return]


def hash_facts(facts: Any) -> str:
    """Hash facts as JSON, whatever the order of their names; other values count as text."""
    return hash_text(json.dumps(facts, sort_keys=True, default=str))


def hash_text(text: str) -> str:
    """Hash a text to 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(text.encode(errors="surrogatepass"))
