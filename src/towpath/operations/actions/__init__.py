"""Executors of the actions of plans: SQL statements, shell commands and HTTP requests on nodes."""
