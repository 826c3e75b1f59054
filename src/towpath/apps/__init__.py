"""Applications on top of the public surface of Towpath."""
