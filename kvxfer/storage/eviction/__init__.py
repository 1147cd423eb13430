"""Eviction: the order in which blocks leave a store that is full, and the wishes of callers."""
