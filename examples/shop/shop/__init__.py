"""A project of several modules: see docs/projects.md."""
