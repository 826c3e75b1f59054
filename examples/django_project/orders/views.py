from __future__ import annotations

from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.http import require_POST

from orders.models import Order
from orders.tasks import confirm

try:
    from django.tasks.exceptions import TaskResultDoesNotExist
except ImportError:  # before Django 6.0
    from django_tasks.exceptions import TaskResultDoesNotExist


@require_POST
@transaction.atomic
def create(request: HttpRequest) -> HttpResponse:
    order = Order.objects.create(item=request.POST["item"], email=request.POST["email"])
    result = confirm.enqueue(order.id)
    return JsonResponse({"order": order.id, "task": result.id}, status=202)


def status(request: HttpRequest, id: str) -> HttpResponse:
    try:
        result = confirm.get_result(id)
    except TaskResultDoesNotExist:
        return JsonResponse({"error": "no such task"}, status=404)
    value = result.return_value if result.status == "SUCCESSFUL" else None
    return JsonResponse({"status": result.status, "value": value})
