"""Enqueue from another program: import the task, call `enqueue`."""

from shop.reports.tasks import count

print(count.enqueue(["ada", "bob"]).id)
