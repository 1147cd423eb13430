"""Weight files: the revision of a checkpoint by its files, as all engines of a machine name it."""

import json
from pathlib import Path
from typing import Any

import xxhash

OF_NO_VALUE = ("_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype")
"""Fields of a model's configuration that say where it came from, or that a namespace has itself."""
WEIGHT_SUFFIXES = (
    *(".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json"),
    *("quant_config.json", "quantize_config.json", "quant_cfg.json", ".py"),
)
"""Ends of the names of files that say what is computed, besides `config.json`: weights, how they
are quantized, and code of the model's own."""


def find_weights_revision(path: str, *, revision: str = "", commit: str = "") -> str:
    """Find the revision of the weights: a commit, the `revision` of the caller, or a file hash.

    The files of a local folder are hashed by size and time, not by content, which would read the
    whole model again. So a copy of the folder is another revision, unless `revision` is given.
    Empty when there is none.
    """
    place = Path(path)
    if not path or not place.exists():
        return commit or revision
    if revision:
        return revision
    files = [place] if place.is_file() else sorted(place.iterdir())
    weights = [file for file in files if file.name.endswith(WEIGHT_SUFFIXES) and file.exists()]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weights]
    return hash_text(json.dumps(stats)) if stats else ""


def config_facts(config: Any) -> dict[str, Any]:
    """Collect what may change keys and values of a configuration of transformers, as JSON types."""
    facts = {key: value for key, value in config.to_dict().items() if key not in OF_NO_VALUE}
    return json.loads(json.dumps(facts, default=str))  # type: ignore[no-any-return]


def hash_text(text: str) -> str:
    """Hash a text, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(text.encode(errors="surrogatepass"))
