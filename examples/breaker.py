"""A circuit breaker during an outage of 90 seconds: it opens, waiting jobs keep their attempts, all
succeed."""

from __future__ import annotations

from towpath import App, Breaker

app = App("memory://")
outage = {"now": True}
calls: list[int] = []


@app.task(
    breaker=Breaker("platform-x", failures=5, window=60, cooldown=30, probes=2), backoff=1, max_attempts=10
)
def fetch(report: int) -> int:
    calls.append(report)
    if outage["now"]:
        raise ConnectionError("no answer")
    return report * 10


def main() -> None:
    with app.testing() as bench:
        reports = [fetch.enqueue(n) for n in range(100)]
        bench.drain()
        print(f"{len(calls)} calls, then {app.breakers.phase('platform-x')}")
        print(reports[50].explain())
        bench.advance(90)
        print(f"{len(calls)} calls after 90 s: one probe per cool-down")
        outage["now"] = False
        bench.advance(60)
        print(
            f"{app.breakers.phase('platform-x')}: {len(bench.jobs(state='done'))} done, the last was "
            f"{reports[-1].result()}"
        )
        print(f"attempts of a job that waited: {reports[-1].status().attempts}")


if __name__ == "__main__":
    main()
