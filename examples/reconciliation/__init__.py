"""Affiliates report what their posts have earned; the platforms know the truth. `python -m reconciliation`
shows it at work."""
