from __future__ import annotations

from django.test import TestCase

from orders.models import Order
from towpath.contrib.django import towpath_app


class OrderTests(TestCase):
    def test_an_order_is_confirmed(self) -> None:
        # A ledger in memory; `drain` runs the tasks here, inside the transaction of the test.
        with towpath_app().testing() as bench:
            with self.captureOnCommitCallbacks(execute=True):
                answer = self.client.post("/orders", {"item": "lamp", "email": "ada@example.com"})
            url = f"/tasks/{answer.json()['task']}"
            assert self.client.get(url).json()["status"] == "READY"
            bench.drain()
            assert self.client.get(url).json()["value"] == "confirmed lamp to ada@example.com"
        assert Order.objects.get().confirmed

    def test_a_task_that_does_not_exist(self) -> None:
        with towpath_app().testing():
            assert self.client.get("/tasks/unknown").status_code == 404
