"""Queues with their limits, and messages that are consumed by hand."""
