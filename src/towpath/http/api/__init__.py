"""The calls beyond lockd: bulk messages, queues, dead letters, jobs, groups, the fleet and events."""

from __future__ import annotations

from towpath.app import App
from towpath.http.api.bulk import BulkRoutes
from towpath.http.api.events import EventRoutes
from towpath.http.api.fleet import FleetRoutes, ScheduleRoutes
from towpath.http.api.groups import GroupRoutes
from towpath.http.api.jobs import JobRoutes
from towpath.http.api.messages import MessageSearchRoutes
from towpath.http.api.queues import QueueAdminRoutes
from towpath.http.api.waiting import LongPolls
from towpath.http.context import ServerContext
from towpath.http.table import Route


def api_routes(context: ServerContext, app: App) -> tuple[Route, ...]:
    polls = LongPolls(context, context.options.max_consumers)
    return (
        *BulkRoutes(context).routes,
        *QueueAdminRoutes(context).routes,
        *MessageSearchRoutes(context).routes,
        *JobRoutes(context, app, polls).routes,
        *GroupRoutes(context, app, polls).routes,
        *ScheduleRoutes(app).routes,
        *FleetRoutes(context, app).routes,
        *EventRoutes(context, polls).routes,
    )
