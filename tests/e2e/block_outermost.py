"""vLLM plug-in that makes its CPU attention lay blocks outermost.

`VLLM_KV_CACHE_LAYOUT=BLHNC` is refused on CPU platforms, because the CPU backend declares one
layout only. Its kernels take the strides of any layout with the same pages, though.
"""

from pathlib import Path

NAME = "kvxfer-test-block-outermost"
LAYOUT = "BLHNC"


def declare() -> None:
    """Add the layout to those that the CPU backend declares."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layouts = CPUAttentionBackend.supported_kv_cache_layouts()
    wanted = KVCacheLayout[LAYOUT]
    if wanted not in layouts:
        CPUAttentionBackend.supported_kv_cache_layouts = lambda: (*layouts, wanted)


def install(directory: Path) -> None:
    """Write what makes vLLM load a plug-in where it finds modules in this folder."""
    information = directory / f"{NAME.replace('-', '_')}-1.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    entry = f"[vllm.general_plugins]\n{NAME} = {__name__}:declare\n"
    (information / "entry_points.txt").write_text(entry)
