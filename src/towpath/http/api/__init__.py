"""The calls beyond lockd: bulk messages, queues, dead letters, jobs, groups, the fleet and events."""

from __future__ import annotations

from towpath.app import App
from towpath.http.api.bulk import BulkRoutes
from towpath.http.context import ServerContext
from towpath.http.table import Route


def api_routes(context: ServerContext, app: App) -> tuple[Route, ...]:
    return (*BulkRoutes(context).routes,)
