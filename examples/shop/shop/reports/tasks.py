from shop.app import app
from shop.mail.tasks import welcome


@app.task(queue="reports")
def count(names: list[str]) -> int:
    welcome.enqueue_many([welcome.of(name) for name in names])
    return len(names)


@app.cron("0 3 * * *", name="nightly")
@app.task(queue="reports")
def nightly() -> None:
    print("a new day")
