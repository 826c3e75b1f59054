"""The files of examples/deploy and the pages of docs/deploy: commands are accepted, names exist, times fit.
Neither Docker nor Kubernetes is needed."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest
import yaml

from tests.support.documents import ROOT, blocks, towpath_commands
from tests.support.processes import command
from tests.support.shell import EXECUTABLE, Shell, parsed, python
from tests.support.waiting import WAIT
from towpath import App
from towpath.core.checks import SECOND
from towpath.observe.metrics import LedgerCollector
from towpath.runtime.worker.worker import CLEANUP
from towpath.tasks.active_hooks import CLOSE_SECONDS

FILES = ROOT / "examples" / "deploy"
PAGES = ROOT / "docs" / "deploy"
SHOP = ROOT / "examples" / "shop"
COMPOSE = ("compose.yaml", "compose-sqlite.yaml", "compose-server.yaml")
AFTER_GRACE = CLEANUP + 2 * CLOSE_SECONDS
"""Seconds that a worker may need after its grace time: for handlers that were requested to stop, hooks of
failures, and lifespans."""


def text(name: str) -> str:
    return (FILES / name).read_text("utf-8")


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile."""
    lines = [line for line in text("Dockerfile").splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def services(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text(name))["services"]
    return found


def objects(name: str) -> dict[str, Any]:
    """The Kubernetes objects of a file by their kinds."""
    return {each["kind"]: each for each in yaml.safe_load_all(text(name))}


def container(kind: str) -> dict[str, Any]:
    [found] = objects("kubernetes.yaml")[kind]["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text("towpath-worker@.service"))
    return parser["Service"]


def command_lines() -> dict[str, list[str]]:
    """The arguments of every `towpath` in the files."""
    docker = dict(instructions())
    assert json.loads(docker["ENTRYPOINT"]) == ["towpath"]
    found = {"Dockerfile": json.loads(docker["CMD"])}
    for name in COMPOSE:
        for service, each in services(name).items():
            if each["image"] == "shop":
                found[f"{name}, {service}"] = each["command"]
    for kind in ("Job", "Deployment"):
        found[f"kubernetes.yaml, {kind}"] = container(kind)["args"]
    executable, *arguments = shlex.split(unit()["ExecStart"])
    assert executable.endswith("/bin/towpath")
    return found | {"towpath-worker@.service": arguments}


COMMANDS = command_lines()
WORKERS = {name: each for name, each in COMMANDS.items() if each[0] == "worker"}


def test_every_command_is_accepted() -> None:
    found = {name: parsed(arguments).command_path for name, arguments in COMMANDS.items()}
    assert set(found.values()) == {"towpath worker", "towpath ledger migrate", "towpath serve"}
    assert {name: parsed(each).params["target"] for name, each in WORKERS.items()} == dict.fromkeys(
        WORKERS, "shop.app:app"
    )
    with pytest.raises(click.UsageError):
        parsed(["worker", "shop.app:app", "--gracious", "30s"])


def seconds(span: str) -> float:
    return float(span.removesuffix("s"))


def test_a_worker_is_not_killed_before_its_grace_time_is_over() -> None:
    patience = {
        "compose.yaml, worker": seconds(services("compose.yaml")["worker"]["stop_grace_period"]),
        "compose-sqlite.yaml, worker": seconds(
            services("compose-sqlite.yaml")["worker"]["stop_grace_period"]
        ),
        "kubernetes.yaml, Deployment": objects("kubernetes.yaml")["Deployment"]["spec"]["template"]["spec"][
            "terminationGracePeriodSeconds"
        ],
        "towpath-worker@.service": seconds(unit()["TimeoutStopSec"]),
    }
    for name, allowed in patience.items():
        assert allowed >= parsed(WORKERS[name]).params["grace"] / SECOND + AFTER_GRACE, name


def test_the_image_is_built_from_files_that_exist() -> None:
    ignored, *allowed = [line for line in text("Dockerfile.dockerignore").splitlines() if line[:1] != "#"]
    assert ignored == "*"
    sent = [ROOT / line.removeprefix("!") for line in allowed if line.startswith("!")]
    copies = [rest.split() for word, rest in instructions() if word == "COPY" and "--from" not in rest]
    sources = [ROOT / source for *sources, _ in copies for source in sources]
    assert len(sources) == 5
    for source in sources:
        assert source.exists()
        assert source in sent
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    [wanted] = re.findall(r"\.\[([\w,]+)\]", text("Dockerfile"))
    assert set(wanted.split(",")) <= set(extras)
    assert dict(instructions())["USER"].isdigit()


@pytest.fixture
def shop(tmp_path: Path) -> Shell:
    shutil.copytree(SHOP, tmp_path, dirs_exist_ok=True)
    return Shell(tmp_path)


@pytest.mark.ledgers("postgres")
def test_the_services_of_compose_run(shop: Shell, url: str) -> None:
    """The migration, then a worker with its health check and a graceful stop."""
    found = services("compose.yaml")
    shop(*found["migrate"]["command"], "--url", url)
    shop("enqueue", "shop.mail.tasks.welcome", "--queue", "mail", "--args", '{"name": "ada"}', "--url", url)
    arguments = [word.replace("9100", "0") for word in found["worker"]["command"]]
    with command(shop, *arguments, "--url", url) as worker:
        metrics = json.loads(worker.until('"worker_started"'))["metrics"]
        how, python, option, check = found["worker"]["healthcheck"]["test"]
        assert (how, python, option) == ("CMD", "python", "-c")
        check = check.replace("http://127.0.0.1:9100/healthz", metrics.replace("metrics", "healthz"))
        exec(check.replace("timeout=5", f"timeout={WAIT}"))
        worker.until('"job_done"')
        assert worker.end() == 0
    assert found["migrate"]["depends_on"] == {"database": {"condition": "service_healthy"}}
    assert found["worker"]["depends_on"] == {"migrate": {"condition": "service_completed_successfully"}}


def test_the_volume_holds_the_whole_directory_of_the_sqlite_file() -> None:
    worker = services("compose-sqlite.yaml")["worker"]
    [(_, mount)] = [volume.split(":") for volume in worker["volumes"]]
    path = Path(worker["environment"]["TOWPATH_URL"].removeprefix("sqlite:///"))
    assert str(path.parent) == mount
    assert f"/{mount.strip('/')}\n" in "\n".join(
        f"{rest}\n" for word, rest in instructions() if word == "RUN"
    )


def test_the_probes_of_kubernetes_ask_the_port_of_the_worker() -> None:
    worker = container("Deployment")
    options = parsed(worker["args"]).params
    [port] = worker["ports"]
    assert (port["containerPort"], options["metrics_host"]) == (options["metrics"], "0.0.0.0")
    for probe in ("startupProbe", "livenessProbe"):
        assert worker[probe]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    spec = objects("kubernetes.yaml")["Deployment"]["spec"]
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    assert {each["name"] for each in worker["volumeMounts"]} == {
        each["name"] for each in spec["template"]["spec"]["volumes"]
    }


def test_the_scalers_scale_the_deployment() -> None:
    deployment = objects("kubernetes.yaml")["Deployment"]["metadata"]["name"]
    keda = objects("keda.yaml")["ScaledObject"]["spec"]
    hpa = objects("hpa.yaml")["HorizontalPodAutoscaler"]["spec"]
    assert keda["scaleTargetRef"]["name"] == hpa["scaleTargetRef"]["name"] == deployment
    # Without a worker no delayed job becomes ready and no schedule fires.
    assert keda["minReplicaCount"] >= 1
    assert hpa["minReplicas"] >= 1
    [metric] = [each["external"]["metric"] for each in hpa["metrics"]]
    assert metric["name"] in {family.name for family in LedgerCollector.describe()}
    assert sorted(metric["selector"]["matchLabels"]) == ["queue", "state"]
    names = {each["name"] for each in container("Deployment")["env"]}
    assert keda["triggers"][0]["metadata"]["connectionFromEnv"] in names


@pytest.mark.ledgers("postgres")
def test_the_query_of_keda_counts_jobs_that_can_run(app: App, url: str) -> None:
    [trigger] = objects("keda.yaml")["ScaledObject"]["spec"]["triggers"]

    def count() -> Any:
        with psycopg.connect(url) as connection:
            [row] = connection.execute(trigger["metadata"]["query"]).fetchall()
            return row

    assert count() == (0,)
    app.queue("mail").put_many(["a", "b", "c"])
    app.queue("mail").put("later", delay=3600)
    app.queue("reports").put_many(["d", "e"])
    app.queue("other").put("f")
    assert count() == (5,)
    held = app.queue("mail").get_many(2)
    assert count() == (5,)
    app.queue("mail").pause()
    assert count() == (4,)
    for message in held:
        message.ack()
    assert count() == (2,)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    installed = text("towpath-worker@.service").replace("/srv/shop/.venv/bin/towpath", EXECUTABLE[0])
    (tmp_path / "towpath-worker@.service").write_text(installed, "utf-8")
    analyze = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "towpath-worker@1.service")]
    ended = subprocess.run(analyze, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_unit_reads_settings_that_exist(shop: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unit()["KillMode"] == "mixed"
    given = dict(line.split("=", 1) for line in text("worker.env").splitlines() if line[:1] != "#")
    name, _, value = unit()["Environment"].partition("=")
    for each in {**given, name: value}.items():
        monkeypatch.setenv(*each)
    settings = shop("doctor", "--json", "--url", shop.url).json["settings"]
    assert settings["queues"]["value"] == given["TOWPATH_QUEUES"].split(",")
    assert settings["name"]["value"] == value
    assert "TOWPATH_URL" in given


def shown() -> Iterator[tuple[str, str]]:
    """(page, file) for each file that a page shows as a whole."""
    for page in sorted(PAGES.glob("*.md")):
        for name in re.findall(r"^`examples/deploy/(\S+)`:$", page.read_text("utf-8"), re.MULTILINE):
            yield page.name, name


def test_the_pages_show_the_files() -> None:
    assert sorted(name for _, name in shown()) == sorted(path.name for path in FILES.iterdir())
    for page, name in shown():
        content = (PAGES / page).read_text("utf-8").partition(f"`examples/deploy/{name}`:\n\n")[2]
        _, block, _ = content.split("```", 2)
        assert block.partition("\n")[2] == text(name), name


def test_the_commands_of_the_pages_are_accepted() -> None:
    texts = [page.read_text("utf-8") for page in PAGES.glob("*.md")]
    commands = [words for text in texts for words in towpath_commands(text)]
    assert {parsed(words).command_path for words in commands} == {
        *("towpath doctor", "towpath stats", "towpath workers list"),
    }


COLLECT = """
import json, sentry_sdk
from sentry_sdk.transport import Transport

events = []


class Collect(Transport):
    def capture_envelope(self, envelope):
        events.extend(item.payload.json for item in envelope.items if item.type == "event")


init = sentry_sdk.init
replaced = {"dsn": "https://key@sentry.example/1", "transport": Collect, "auto_enabling_integrations": False}
sentry_sdk.init = lambda **options: init(**{**options, **replaced})
"""
"""Replaces the network of Sentry: every event is collected."""


def test_sentry_gets_one_event_for_a_dead_letter(tmp_path: Path) -> None:
    """The program of the page, with its three attempts."""
    program = blocks((PAGES / "logging.md").read_text("utf-8"), "python")[-1]
    ran = python(tmp_path, f"{COLLECT}\n{program}\nprint(json.dumps(events))")
    assert (ran.code, ran.err) == (0, "")
    events = json.loads(ran.out.splitlines()[-1])
    *sent, dead = events
    assert [event["message"] for event in sent] == ["a zero is coming"] * 3
    assert dead["logger"] == "towpath.jobs"
    assert dead["exception"]["values"][-1]["type"] == "ZeroDivisionError"
    assert dead["exception"]["values"][-1]["stacktrace"]["frames"][-1]["function"] == "divide"
    assert dead["tags"] == {"job_id": sent[0]["tags"]["job_id"], "kind": "divide", "queue": "default"}
    assert [event["tags"]["kind"] for event in sent] == ["divide"] * 3
    crumbs = [each["message"] for each in dead["breadcrumbs"]["values"]]
    assert len([each for each in crumbs if "failed in" in each]) == 2
