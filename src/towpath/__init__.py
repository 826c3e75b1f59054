"""Towpath: durable work for Python."""
