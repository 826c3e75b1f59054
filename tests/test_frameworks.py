"""The pages of docs/frameworks: programs with a real worker, and files for other tools that name what exists.
`tests/test_docs.py` runs the programs in one process."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from tests.support.documents import ROOT, blocks
from tests.support.shell import Shell
from towpath import App
from towpath.observe.metrics import install

PAGES = ROOT / "docs" / "frameworks"


def program(page: str, folder: Path) -> Path:
    """The first program of a page, as the file `shop.py`."""
    path = folder / "shop.py"
    path.write_text(blocks((PAGES / page).read_text("utf-8"), "python")[0], "utf-8")
    return path


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The program of the Flask page, imported as the server imports it."""
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("shop", program("flask.md", tmp_path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "shop", module)
    spec.loader.exec_module(module)
    yield module
    module.jobs.close()


def test_a_worker_runs_the_jobs_of_flask(shop: ModuleType, tmp_path: Path) -> None:
    client = shop.web.test_client()
    posted = client.post("/users/ada@example.com").json["job"]
    Shell(tmp_path).run("worker", "shop:jobs", "--burst")
    assert client.get(f"/jobs/{posted}").json == {"result": "from shop@example.com to ada@example.com"}


def test_the_alerts_and_the_dashboard_name_metrics_that_exist() -> None:
    folder = ROOT / "examples" / "observability"
    [group] = yaml.safe_load((folder / "alerts.yaml").read_text("utf-8"))["groups"]
    panels = json.loads((folder / "dashboard.json").read_text("utf-8"))["panels"]
    expressions = [rule["expr"] for rule in group["rules"]]
    expressions += [target["expr"] for panel in panels for target in panel["targets"]]
    named = {name for each in expressions for name in re.findall(r"towpath_\w+", each)}
    registry = CollectorRegistry()
    with App("memory://") as app:
        install(app.bus, app.ledger, registry)
        text = generate_latest(registry).decode()
    exported = set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))
    assert {re.sub(r"_bucket$", "", name) for name in named} - exported == set()
    assert len(named) >= 7
