"""Eviction: the order in which blocks leave a full store, and the wishes of callers."""
