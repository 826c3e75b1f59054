from __future__ import annotations

from orders.models import Order
from towpath.contrib.django import task_options

try:
    from django.tasks import task
except ImportError:  # before Django 6.0
    from django_tasks import task


@task(queue_name="mail")
@task_options(max_attempts=5, backoff=[10, 60, 600], timeout=60)
def confirm(order_id: int) -> str:
    order = Order.objects.get(id=order_id)
    if not order.confirmed:  # a task that is tried again may find its work done
        print(f"To {order.email}: your {order.item} is on its way")  # here a letter would be sent
        Order.objects.filter(id=order_id).update(confirmed=True)
    return f"confirmed {order.item} to {order.email}"
