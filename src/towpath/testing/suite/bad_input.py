"""Bad input: refused at the boundary, by field and value, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from towpath.core.checks import FOREVER, MAX_PAYLOAD
from towpath.core.commands import (
    Abort,
    Append,
    Cancel,
    Claim,
    Note,
    Open,
    Progress,
    Purge,
    Renew,
    Resolution,
    Resolve,
    Seal,
    Selector,
    SetPart,
    SetQueue,
    Settle,
    Upkeep,
    Want,
)
from towpath.core.job import After, Done, FailOutcome, Key, KeyPolicy, RetryOutcome, Spec
from towpath.core.limits import Rate
from towpath.core.views import Query, page_token
from towpath.errors import InvalidInput, UnknownJob
from towpath.testing.suite.harness import LEASE, Harness, Suite, spec, whole_group

NAN = float("nan")
SURROGATE = "\ud800"


def _claim(**fields: Any) -> Claim:
    return Claim(**{"owner": "w", "wants": (Want("q"),), "lease": LEASE, **fields})


BAD: dict[str, tuple[Callable[[], object], str]] = {
    "empty id": (lambda: spec(""), "id"),
    "long id": (lambda: spec("x" * 256), "id"),
    "NUL in an id": (lambda: spec("a\0b"), "id"),
    "surrogate in an id": (lambda: spec(SURROGATE), "id"),
    "id that is no text": (lambda: spec(7), "id"),  # type: ignore[arg-type]
    "empty queue": (lambda: spec("a", ""), "queue"),
    "long queue": (lambda: spec("a", "q" * 256), "queue"),
    "blank in a queue": (lambda: spec("a", "my queue"), "queue"),
    "star in a queue": (lambda: spec("a", "q*"), "queue"),
    "NUL in a queue": (lambda: spec("a", "q\0"), "queue"),
    "newline at the end of a queue": (lambda: spec("a", "q\n"), "queue"),
    "surrogate in a kind": (lambda: spec("a", kind=SURROGATE), "kind"),
    "NUL in a kind": (lambda: spec("a", kind="\0"), "kind"),
    "text as payload": (lambda: spec("a", payload="text"), "payload"),
    "payload over 16 MiB": (lambda: spec("a", payload=bytes(MAX_PAYLOAD + 1)), "payload"),
    "surrogate in a content type": (lambda: spec("a", content_type=SURROGATE), "content_type"),
    "headers that are no mapping": (lambda: spec("a", headers=["x"]), "headers"),
    "NUL in a header": (lambda: spec("a", headers={"h": "\0"}), "headers[h]"),
    "number in a header": (lambda: spec("a", headers={"h": 1}), "headers[h]"),
    "too many headers": (lambda: spec("a", headers={f"h{n}": "x" * 1000 for n in range(70)}), "headers"),
    "priority too low": (lambda: spec("a", priority=32_768), "priority"),
    "priority too high": (lambda: spec("a", priority=-32_769), "priority"),
    "unknown priority": (lambda: spec("a", priority="urgent"), "priority"),
    "broken priority": (lambda: spec("a", priority=1.5), "priority"),
    "priority that is true": (lambda: spec("a", priority=True), "priority"),
    "empty part": (lambda: spec("a", part=""), "part"),
    "part that looks serial": (lambda: spec("a", part="serial:k"), "part"),
    "part beside a serial key": (lambda: spec("a", part="p", key=Key("k", KeyPolicy.SERIAL)), "part"),
    "negative delay": (lambda: spec("a", delay=-1), "delay"),
    "NaN delay": (lambda: spec("a", delay=NAN), "delay"),
    "delay as a float": (lambda: spec("a", delay=1.0), "delay"),
    "delay beyond all time": (lambda: spec("a", delay=FOREVER + 1), "delay"),
    "negative time": (lambda: spec("a", ready_at=-1), "ready_at"),
    "NaN time": (lambda: spec("a", ready_at=NAN), "ready_at"),
    "delay and time": (lambda: spec("a", delay=1, ready_at=1), "ready_at"),
    "ttl of zero": (lambda: spec("a", ttl=0), "ttl"),
    "NaN ttl": (lambda: spec("a", ttl=NAN), "ttl"),
    "no attempts": (lambda: spec("a", max_attempts=0), "max_attempts"),
    "NaN attempts": (lambda: spec("a", max_attempts=NAN), "max_attempts"),
    "no losses": (lambda: spec("a", max_losses=0), "max_losses"),
    "timeout of zero": (lambda: spec("a", timeout=0), "timeout"),
    "negative retention": (lambda: spec("a", retention=-1), "retention"),
    "empty group": (lambda: spec("a", group=""), "group"),
    "negative generation": (lambda: spec("a", generation=-1), "generation"),
    "long correlation id": (lambda: spec("a", correlation_id="x" * 256), "correlation_id"),
    "too many dependencies": (lambda: spec("a", after=["x"] * 10_001), "after"),
    "empty dependency": (lambda: After(""), "after.id"),
    "empty key": (lambda: Key(""), "key.name"),
    "long key": (lambda: Key("x" * 513), "key.name"),
    "long serial key": (lambda: Key("x" * 249, KeyPolicy.SERIAL), "key.name"),
    "unknown policy": (lambda: Key("k", "first"), "key.policy"),  # type: ignore[arg-type]
    "negative window": (lambda: Key("k", window=-1), "key.window"),
    "append of nothing": (lambda: Append(()), "specs"),
    "want of a bad pattern": (lambda: Want("a b"), "queue"),
    "want of none": (lambda: Want("q", 0), "n"),
    "want of too many": (lambda: Want("q", 10_001), "n"),
    "negative once": (lambda: Want("q", 1, -1), "once"),
    "claim without an owner": (lambda: _claim(owner=""), "owner"),
    "claim with a bad owner": (lambda: _claim(owner=SURROGATE), "owner"),
    "claim without wants": (lambda: _claim(wants=()), "wants"),
    "lease of zero": (lambda: _claim(lease=0), "lease"),
    "NaN lease": (lambda: _claim(lease=NAN), "lease"),
    "lease of two days": (lambda: Renew((), 2 * 86_400_000_000), "lease"),
    "negative retry": (lambda: RetryOutcome(-1), "delay"),
    "NaN retry": (lambda: RetryOutcome(NAN), "delay"),  # type: ignore[arg-type]
    "NUL in an error": (lambda: FailOutcome("\0"), "error"),
    "surrogate in an error": (lambda: RetryOutcome(0, SURROGATE), "error"),
    "long error": (lambda: FailOutcome("x" * 65_537), "error"),
    "result over 16 MiB": (lambda: Done(bytes(MAX_PAYLOAD + 1)), "result"),
    "text as result": (lambda: Done("text"), "result"),  # type: ignore[arg-type]
    "negative progress": (lambda: Progress("a", 1, done=-1), "done"),
    "NaN progress": (lambda: Progress("a", 1, total=NAN), "total"),  # type: ignore[arg-type]
    "long cursor": (lambda: Progress("a", 1, cursor=bytes(256 * 1024 + 1)), "cursor"),
    "progress with a word as note": (lambda: Progress("a", 1, notes=("k",)), "notes"),  # type: ignore[arg-type]
    "progress with gates": (
        lambda: Progress("a", 1, notes=(Note(key="k", value=b"", gates=(SetQueue(queue="q"),)),)),
        "notes",
    ),
    "empty selector": (Selector, "selector"),
    "unknown state in a selector": (lambda: Selector(states=("lost",)), "state"),  # type: ignore[arg-type]
    "bad id in a selector": (lambda: Selector(ids=("\0",)), "ids"),
    "bad queue in a selector": (lambda: Selector(queue=""), "queue"),
    "bad parent in a selector": (lambda: Selector(parent="\0"), "parent"),
    "negative generation in a selector": (lambda: Selector(generation=-1), "generation"),
    "NaN age in a selector": (lambda: Selector(created_before=NAN), "created_before"),  # type: ignore[arg-type]
    "cancel of none": (lambda: Cancel(where=Selector(queue="q"), limit=0), "limit"),
    "purge of too many": (lambda: Purge(where=Selector(queue="q"), limit=10_001), "limit"),
    "empty group name": (lambda: Open(""), "group"),
    "surrogate in a group name": (lambda: Open(SURROGATE), "group"),
    "unknown on_failure": (lambda: Open("g", "explode"), "on_failure"),  # type: ignore[arg-type]
    "unknown ending": (lambda: Open("g", then={"lost": (spec("a"),)}), "then"),
    "then after a stranger": (lambda: Open("g", then={"done": (spec("a", after=["b"]),)}), "then[done]"),
    "then after two": (
        lambda: Open("g", then={"done": (spec("a"), spec("a"), spec("b", after=["a"]))}),
        "then[done]",
    ),
    "then after a group": (
        lambda: Open("g", then={"done": (spec("a"), spec("b", after=[whole_group("a")]))}),
        "then[done]",
    ),
    "then in a cycle": (
        lambda: Open("g", then={"done": (spec("a", after=["b"]), spec("b", after=["a"]))}),
        "then[done]",
    ),
    "then in the same group": (lambda: Open("g", then={"done": (spec("a", group="g"),)}), "then[done]"),
    "stop that is no truth": (lambda: Abort("g", 1), "stop"),  # type: ignore[arg-type]
    "unknown decision": (lambda: Resolve("a", "lost", "why", "ada"), "outcome"),  # type: ignore[arg-type]
    "a decision without a reason": (lambda: Resolve("a", Resolution.MARKED, "", "ada"), "why"),
    "a decision of nobody": (lambda: Resolve("a", Resolution.MARKED, "why", ""), "by"),
    "a decision about nothing": (lambda: Resolve("", Resolution.MARKED, "why", "ada"), "id"),
    "a decision with text": (
        lambda: Resolve("a", Resolution.MARKED, "why", "ada", "1"),  # type: ignore[arg-type]
        "result",
    ),
    "surrogate in a sealed group": (lambda: Seal(SURROGATE), "group"),
    "NUL in an aborted group": (lambda: Abort("\0"), "group"),
    "surrogate in a settled id": (lambda: Settle(SURROGATE, 1, Done()), "id"),
    "surrogate in a renewed id": (lambda: Renew(((SURROGATE, 1),), LEASE), "held"),
    "surrogate in a progressed id": (lambda: Progress(SURROGATE, 1), "id"),
    "surrogate in a token": (lambda: _claim(token=SURROGATE), "token"),
    "pattern as a queue to set": (lambda: SetQueue(queue="q*"), "queue"),
    "paused by a word": (lambda: SetQueue(queue="q", paused="yes"), "paused"),  # type: ignore[arg-type]
    "negative capacity": (lambda: SetQueue(queue="q", capacity=-1), "capacity"),
    "negative cap": (lambda: SetQueue(queue="q", cap=-1), "cap"),
    "NaN hold": (lambda: SetQueue(queue="q", not_before=NAN), "not_before"),  # type: ignore[arg-type]
    "negative keep": (lambda: SetQueue(queue="q", keep=-1), "keep"),
    "surrogate in a why": (lambda: SetQueue(queue="q", why=SURROGATE), "why"),
    "empty part to set": (lambda: SetPart(queue="q", part=""), "part"),
    "weight of zero": (lambda: SetPart(queue="q", part="p", weight=0), "weight"),
    "rate of zero": (lambda: Rate(0), "rate.count"),
    "NaN rate": (lambda: Rate(NAN), "rate.count"),  # type: ignore[arg-type]
    "rate without burst": (lambda: Rate(1, burst=0), "rate.burst"),
    "rate too fast": (lambda: Rate(2, 1e-6), "rate.count"),
    "fence beyond all bounds": (lambda: Settle("a", 2**70, Done()), "fence"),
    "negative fence": (lambda: Progress("a", -1), "fence"),
    "fence of a renewal": (lambda: Renew((("a", 2**70),), 1), "held"),
    "a renewal that is no pair": (lambda: Renew(("ab",), 1), "held"),  # type: ignore[arg-type]
    "outcome that is a word": (lambda: Settle("a", 1, "done"), "outcome"),  # type: ignore[arg-type]
    "dependency that is a word": (lambda: Spec(id="a", queue="q", after=("b",)), "after"),  # type: ignore[arg-type]
    "key that is a word": (lambda: Spec(id="a", queue="q", key="k"), "key"),  # type: ignore[arg-type]
    "generation that is nothing": (lambda: Spec(id="a", queue="q", generation=None), "generation"),  # type: ignore[arg-type]
    "headers that are nothing": (lambda: Spec(id="a", queue="q", headers=None), "headers"),  # type: ignore[arg-type]
    "append of a word": (lambda: Append(("x",)), "specs"),  # type: ignore[arg-type]
    "want that is a word": (lambda: Claim(owner="o", wants=("q",), lease=1), "wants"),  # type: ignore[arg-type]
    "selector that is a mapping": (lambda: Cancel(where={}), "where"),  # type: ignore[arg-type]
    "ids that are one word": (lambda: Selector(ids="abc"), "ids"),  # type: ignore[arg-type]
    "rate that is a number": (lambda: SetQueue(queue="q", rate=5), "rate"),  # type: ignore[arg-type]
    "header of three": (lambda: Query(header=("a", "b", "c")), "header"),  # type: ignore[arg-type]
    "states that are nothing": (lambda: Query(states=None), "states"),  # type: ignore[arg-type]
    "cap of a serial part": (lambda: SetPart(queue="q", part="serial:k", cap=None), "cap"),
    "empty note key": (lambda: Note(key="", value=b""), "key"),
    "surrogate in a note key": (lambda: Note(key=SURROGATE, value=b""), "key"),
    "large note": (lambda: Note(key="k", value=bytes(256 * 1024 + 1)), "value"),
    "note that is text": (lambda: Note(key="k", value="text"), "value"),  # type: ignore[arg-type]
    "negative version": (lambda: Note(key="k", value=b"", expect=-1), "expect"),
    "note with a gate that is none": (lambda: Note(key="k", value=b"", gates=(Done(),)), "gates"),  # type: ignore[arg-type]
    "gates in a settle": (
        lambda: Settle(
            "a", 1, Done(), (), (Note(key="k", value=b"", gates=(SetPart(queue="q", part="p"),)),)
        ),
        "notes",
    ),
    "note that never lives": (lambda: Note(key="k", value=b"", ttl=0), "ttl"),
    "upkeep of nothing": (lambda: Upkeep(0), "limit"),
    "upkeep of a nameless owner": (lambda: Upkeep(1, ("",)), "dead"),
    "unknown state in a query": (lambda: Query(states=("lost",)), "state"),  # type: ignore[arg-type]
    "bad queue in a query": (lambda: Query(queue="a b"), "queue"),
    "NUL in a query": (lambda: Query(part="\0"), "part"),
    "page of none": (lambda: Query(limit=0), "limit"),
    "page too large": (lambda: Query(limit=1001), "limit"),
    "NaN in a query": (lambda: Query(created_from=NAN), "created_from"),  # type: ignore[arg-type]
    "malformed page": (lambda: Query(page="!!!"), "page"),
    "empty page": (lambda: Query(page=""), "page"),
    "foreign page": (lambda: Query(page="MTIz"), "page"),
    "padded page": (lambda: Query(page=page_token(5) + "="), "page"),
    "page that is no text": (lambda: Query(page=5), "page"),  # type: ignore[arg-type]
}


class BadInputSuite(Suite):
    """An invalid value raises InvalidInput and is not stored."""

    @pytest.mark.parametrize("case", BAD)
    def test_invalid_values_are_named(self, harness: Harness, case: str) -> None:
        make, field = BAD[case]
        with harness.unchanged(), pytest.raises(InvalidInput) as caught:
            make()
        assert caught.value.details["field"] == field
        assert f"{field} is " in str(caught.value)
        assert len(str(caught.value)) < 400

    @pytest.mark.parametrize("now", [NAN, -1, 1.5, "now", True, FOREVER + 1])
    def test_invalid_times_are_refused(self, harness: Harness, now: Any) -> None:
        with harness.unchanged(), pytest.raises(InvalidInput) as caught:
            harness.ledger.apply([Append((spec("a"),))], now)
        assert caught.value.details["field"] == "now"

    @pytest.mark.parametrize("command", ["append", None, spec("a"), Done()])
    def test_what_is_no_command_is_refused_with_its_neighbours(self, harness: Harness, command: Any) -> None:
        with harness.unchanged(), pytest.raises(InvalidInput) as caught:
            harness.ask(Append((spec("a"),)), command)
        assert caught.value.details["field"] == "command"

    @pytest.mark.parametrize("now", [NAN, -1, "now"])
    def test_reads_at_invalid_times_are_refused(self, harness: Harness, now: Any) -> None:
        harness.add("a")
        harness.write("k")
        for look in (harness.ledger.explain, harness.ledger.note):
            with pytest.raises(InvalidInput) as caught:
                look("k" if look == harness.ledger.note else "a", now)
            assert caught.value.details["field"] == "now"

    @pytest.mark.parametrize("text", [SURROGATE, "\0", "", "x" * 100_000])
    def test_what_nobody_could_store_is_not_there(self, harness: Harness, text: str) -> None:
        ledger = harness.ledger
        assert (ledger.get(text), ledger.group(text), ledger.note(text, harness.now)) == (None, None, None)
        assert ledger.parts(text) == {}
        with pytest.raises(UnknownJob):
            ledger.explain(text, harness.now)

    def test_the_value_is_shown_but_never_in_full(self, harness: Harness) -> None:
        with pytest.raises(InvalidInput) as caught:
            spec("a", "q" * 10_000)
        assert "'qqq" in str(caught.value)
        assert len(str(caught.value)) < 200

    def test_what_is_just_allowed_is_stored(self, harness: Harness) -> None:
        payload = bytes(MAX_PAYLOAD)
        job = harness.add("x" * 255, "q" * 255, priority=-32_768, payload=payload, kind="", delay=FOREVER)
        assert (job.size, len(job.payload), job.state) == (MAX_PAYLOAD, MAX_PAYLOAD, "scheduled")

    def test_text_that_looks_dangerous_is_only_text(self, harness: Harness) -> None:
        id = "'; drop table job; --%_\\\u2028\u0130😀"
        harness.add(id, kind=id, part=id, correlation_id=id, headers={id: id}, key=Key(id))
        assert harness.found(kind=id, part=id, correlation_id=id, header=(id, id), key=id) == [id]
        assert harness.take().id == id
