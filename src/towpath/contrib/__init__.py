"""Bridges to other frameworks. Each uses the public surface of Towpath and nothing else."""
