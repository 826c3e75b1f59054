"""The tables of docs/api.md, made from the route table of the server: `make reference` writes them."""

from __future__ import annotations

from tests.support.documents import ROOT
from towpath import App
from towpath.http.context import ServerContext
from towpath.http.health import HealthRoutes
from towpath.http.openapi import endpoint_table, error_table
from towpath.http.options import ServerOptions
from towpath.http.routes import route_table
from towpath.http.table import Route

PATH = ROOT / "docs" / "api.md"


def routes() -> tuple[Route, ...]:
    """The routes of a server. Their handlers cannot be called."""
    with App("memory://") as app:
        context = ServerContext(app.engine, ServerOptions())
        health = HealthRoutes(app, context)
        health.close()
        return route_table(context, health, app)


def with_tables(page: str) -> str:
    for mark, table in (("endpoints", endpoint_table(routes())), ("errors", error_table())):
        before, begin, rest = page.partition(f"<!-- {mark} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        assert begin, mark
        assert end, mark
        page = f"{before}{begin}{table}\n{end}{after}"
    return page


if __name__ == "__main__":
    PATH.write_text(with_tables(PATH.read_text("utf-8")), "utf-8")
