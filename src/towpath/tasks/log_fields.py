"""The job in the log records that its handler emits."""

from __future__ import annotations

import logging

from towpath.escapes import escape
from towpath.runtime.worker.job_log import job_fields
from towpath.tasks.new_jobs import running


class JobLogFilter(logging.Filter):
    """Adds the running job to the log records of its handler: `job_id`, `kind`, `queue`, `attempt` and
    `max_attempts`, and `job_label` for a line of text (`[kind short-id] `, empty outside of a handler).

    Add it to a handler of `logging`, not to a logger: a logger does not filter the records of its children.
    A thread that a handler starts has no job, unless it runs in a copy of the context. Values of `extra`
    stay; a record with a `job_id` is left as it is, because a handler that commits may log the end of other
    jobs."""

    def filter(self, record: logging.LogRecord) -> bool:
        found = running.get()
        label = ""
        if found is not None and not hasattr(record, "job_id"):
            fields = job_fields(found.record)
            label = escape(f"[{fields['kind']} {found.record.short_id}] ")
            vars(record).update(fields | vars(record))
        vars(record).setdefault("job_label", label)
        return True
