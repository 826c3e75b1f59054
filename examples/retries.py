"""Outcomes of an attempt, tested with a manual clock: hours of backoff take milliseconds."""

import towpath
from towpath import App, Cancel, Exponential, Fail, Policy, Retry, Snooze

app = App("memory://")

# Retry a dropped connection soon; for all other errors the delay grows up to an hour.
patient = Policy(
    default=Exponential(base=10, factor=3.0, cap=3600),
    by_error={ConnectionError: Exponential(base=0.5, factor=2.0, cap=30)},
)


@app.task(backoff=patient, max_attempts=4)
def fetch(url: str) -> str:
    if towpath.current().attempt < 3:
        raise ConnectionError(f"{url} does not answer")
    return f"{url} after {towpath.current().attempt} attempts"


@app.task(max_attempts=2, backoff=[60])
def charge(card: str) -> str:
    match card:
        case "busy":
            raise Retry("the bank asked for five minutes", after=300)
        case "night":
            raise Snooze(for_=3600)
        case "stolen":
            raise Fail("never again")
        case "withdrawn":
            raise Cancel("the customer left")
        case _:
            raise ValueError(f"no such card: {card}")


if __name__ == "__main__":
    with app.testing() as bench:
        page = fetch.enqueue("example.com")
        jobs = {card: charge.enqueue(card) for card in ("busy", "night", "stolen", "withdrawn", "unknown")}
        bench.advance(3600 * 12)
        print(page.result())
        for card, job in jobs.items():
            now = job.status()
            print(f"{card}: {now.state} {now.reason}, {now.attempts} attempts, {now.failures} failures")

        # A dead letter is kept until it is retried or purged. After a retry it has all its attempts again.
        jobs["unknown"].retry()
        print("revived:", jobs["unknown"].status().state)
