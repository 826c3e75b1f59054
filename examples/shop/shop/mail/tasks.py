from shop.app import app


@app.task(queue="mail", max_attempts=5)
def welcome(name: str) -> str:
    return f"welcome {name}"
