"""Transfers with a bandwidth limit: live progress while they run, and totals from the ledger afterwards."""

from __future__ import annotations

import io
import sys

from towpath import App, Bandwidth, current

app = App("sqlite:///transfers.db")
limits = Bandwidth(down="20MB/s", schedule=[("08:00-18:00", {"up": "2MB/s"})], tz="Europe/Vienna")


@app.task
def download(size: int) -> int:
    source = limits.download(io.BytesIO(bytes(size)))  # in a real program: the body of a response
    done = 0
    for piece in iter(lambda: source.read(64 * 1024), b""):
        done += len(piece)
        current().progress(done, size)
    return done


if __name__ == "__main__":
    with app:
        group = app.group([download.of(1_000_000) for _ in range(8)])
        print(app.progress(group=group.id).summary())
        with app.show_progress({download.kind: "downloading"}, file=sys.stdout):
            app.run(burst=True, concurrency=4)
        for kind in app.history(group=group.id):
            print(f"{kind.kind}: {kind.counts.done} done, {kind.done:,} bytes")
        print(f"{limits.moved['down']:,} bytes passed the limit")
