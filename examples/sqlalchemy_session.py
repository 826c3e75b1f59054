"""A SQLAlchemy engine per worker and a session per attempt, provided to handlers by type.

The session commits before the job is settled: if the process is killed in between, the job runs again. For
rows and the end of the job in one transaction see transactions.py."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Engine, create_engine, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from towpath import App, Fail, Hooks, JobFailure, Running, provided

hooks = Hooks()
app = App("sqlite:///jobs.db", hooks=hooks)


class Base(DeclarativeBase): ...


class Product(Base):
    __tablename__ = "product"

    name: Mapped[str] = mapped_column(primary_key=True)
    price: Mapped[int]


@hooks.lifespan
def engine() -> Iterator[Engine]:
    engine = create_engine("sqlite:///shop.db")
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()
    print("engine closed")


@hooks.middleware
def session(job: Running, engine: Engine = provided) -> Iterator[Session]:
    """Only for handlers that need a session. It commits, or rolls back if the handler raises."""
    with Session(engine) as session, session.begin():
        yield session


@hooks.on_dead
def report(failure: JobFailure, engine: Engine = provided) -> None:
    with Session(engine) as session:
        count = session.scalar(select(func.count()).select_from(Product))
    print(f"{failure.kind}: {failure.exception}; {count} products are stored")


@app.task(name="import")
def import_product(name: str, price: int, *, session: Session = provided) -> None:
    session.merge(Product(name=name, price=price))
    session.flush()
    if price < 0:
        raise Fail(f"the price of {name} is {price}")


@app.task
def total(*, session: Session = provided) -> int:
    return session.scalar(select(func.sum(Product.price))) or 0


if __name__ == "__main__":
    with app.testing() as bench:
        for name, price in {"lamp": 30, "rope": 12, "chair": -1}.items():
            import_product.enqueue(name, price)
        bench.drain()
    with app:
        job = total.enqueue()
        app.run(burst=True)
        print("total:", job.result())
