"""An example application: affiliates report the numbers of their posts, and each report is compared with the
platform. `python -m reconciliation` runs a demonstration."""
