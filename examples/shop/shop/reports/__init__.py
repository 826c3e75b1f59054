"""Reports for the owner."""
