"""The worker of the demonstration that will be killed: it claims, says what it has, and hangs."""

from __future__ import annotations

import sys

from towpath import commands, micros, open_ledger


def main(url: str, queue: str, count: str, lease: str) -> None:
    ledger = open_ledger(url)
    wants = (commands.Want(queue, int(count)),)
    [answer] = ledger.apply([commands.Claim(owner="doomed", wants=wants, lease=micros(float(lease)))])
    assert isinstance(answer, commands.Claimed)
    print(",".join(f"{claim.id} {claim.fence}" for claim in answer.claims), flush=True)
    sys.stdin.read()  # until it is killed, or its parent is gone


if __name__ == "__main__":
    main(*sys.argv[1:])
