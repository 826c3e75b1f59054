"""Where time passes: group commit, leases kept alive, claims handed to those who wait for them."""
