import threading

from towpath import App

app = App()  # towpath.db in this directory; App("sqlite:///work.db") or TOWPATH_URL set another URL


@app.task(queue="mail", max_attempts=5)
def send(to: str, subject: str) -> str:
    return f"sent {subject!r} to {to}"


if __name__ == "__main__":
    job = send.enqueue("ada@example.com", subject="Hello")
    print(job.explain())
    threading.Thread(target=app.run, daemon=True).start()  # a worker; usually its own process
    print(job.result(timeout=10))
