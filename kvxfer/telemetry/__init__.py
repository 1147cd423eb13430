"""Telemetry: observers that make metrics and spans of what happens to blocks."""
