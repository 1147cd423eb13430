"""Telemetry: observers that turn events of blocks into metrics, spans, KV events and a journal."""
