"""The audit log: one line for every administrative action, at the level INFO of `towpath.http.audit`."""

from __future__ import annotations

from towpath.escapes import get_logger
from towpath.http.exchange import Exchange

log = get_logger("towpath.http.audit")


def audit(exchange: Exchange, action: str, subject: str, count: int | None = None) -> None:
    """`action` and `subject` state the effect, such as `pause` and `queue orders`; `count` how many jobs it
    had an effect on."""
    affected = "" if count is None else f": {count}"
    log.info("%s: %s %s%s", exchange.principal.name, action, subject, affected)
