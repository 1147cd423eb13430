"""Tools for engines, off the data path: block tables, attention metadata, layouts by release."""

from kvxfer.engine_side.attention_metadata import (
    AttentionMetadataBuilder,
    BatchOrderError,
    MultiGroupMetadataBuilder,
    TokenBatch,
    TooManyGroupsError,
    decodes_first,
)
from kvxfer.engine_side.block_table import NULL_BLOCK_ID, PAD_SLOT, BlockTable
from kvxfer.engine_side.engine_layout import EngineLayout
from kvxfer.engine_side.layout_zoo import LAYOUT_ZOO
from kvxfer.engine_side.multi_group_block_table import MultiGroupBlockTable
from kvxfer.engine_side.vllm_keys import VLLMKeys

__all__ = [
    "LAYOUT_ZOO",
    "NULL_BLOCK_ID",
    "PAD_SLOT",
    "AttentionMetadataBuilder",
    "BatchOrderError",
    "BlockTable",
    "EngineLayout",
    "MultiGroupBlockTable",
    "MultiGroupMetadataBuilder",
    "TokenBatch",
    "TooManyGroupsError",
    "VLLMKeys",
    "decodes_first",
]
