"""The app of the project. It imports no tasks: the modules of tasks import it."""

from towpath import App

app = App(include=["shop.*.tasks"])
