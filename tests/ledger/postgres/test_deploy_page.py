"""docs/deploy-postgres.md: its statements run unchanged, and its roles have the documented rights and no
others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.support.documents import ROOT, blocks
from tests.support.postgres_member import Tasks
from towpath import App
from towpath.commands import Upkeep
from towpath.testing.postgres import Server

OWNER, WATCH, ENQUEUE, *LOOKS = blocks((ROOT / "docs" / "deploy-postgres.md").read_text("utf-8"), "sql")


@pytest.fixture
def server(postgres_place: Path, tmp_path: Path) -> Iterator[Server]:
    """A server for this module: roles belong to a whole server."""
    with Server.start(postgres_place / f"{tmp_path.name}-{os.getpid()}") as server:
        server.query("CREATE DATABASE shop")
        # The default from PostgreSQL 15 on, so that the owner has only its schema on 14 too.
        server.query("REVOKE ALL ON SCHEMA public FROM PUBLIC", database="shop")
        yield server


def test_the_roles_and_the_queries(server: Server) -> None:
    with psycopg.connect(server.url("shop"), autocommit=True) as admin:
        admin.execute(OWNER.encode())
        with App(server.url("shop", user="shop")) as app:
            step = Tasks(app).step
            step.enqueue("it")
            admin.execute(WATCH.encode())
            with psycopg.connect(server.url("shop", user="watch"), autocommit=True) as watch:
                found = [watch.execute(look.encode()).fetchall() for look in LOOKS]
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    watch.execute("DELETE FROM towpath.job")
            assert found[0] == [("fleet", 0, 0, 1, 0, 0, 0, 0)]
            assert len(found[1]) == 1
            assert found[2] == [(0,)]
            assert "job" in {row[0] for row in found[5]}
            admin.execute(ENQUEUE.encode())
            with psycopg.connect(server.url("shop", user="web"), autocommit=True) as web:
                step.options(on=web).enqueue("plain")
                step.options(on=web, key="k").enqueue("keyed")
                for statement in (
                    b"DELETE FROM towpath.job",
                    b"UPDATE towpath.job SET priority = 0",
                    b"TABLE towpath.body",
                    b"SELECT payload FROM towpath.job",
                ):
                    with pytest.raises(psycopg.errors.InsufficientPrivilege):
                        web.execute(statement)
            app.ledger.apply([Upkeep()])
            assert app.queue("fleet").stats().counts.ready == 3
            assert app.ledger.check() == []
    with psycopg.connect(server.url("shop", user="shop")) as owner:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            owner.execute("CREATE TABLE public.mine (n int)")
