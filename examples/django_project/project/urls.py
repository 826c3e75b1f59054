from __future__ import annotations

from django.urls import path
from orders import views

urlpatterns = [path("orders", views.create), path("tasks/<str:id>", views.status)]
