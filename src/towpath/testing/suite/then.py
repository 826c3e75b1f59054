"""What follows the end of a group."""

from __future__ import annotations

import pytest

from towpath.core.ids import derived
from towpath.core.views import Counts
from towpath.testing.suite.desk import Desk, Suite, ids, replace, spec, whole_group
from towpath.testing.suite.groups import grouped


class ThenSuite(Suite):
    """What follows the end of a group."""

    @pytest.mark.parametrize("ending", ["done", "failed", "canceled"])
    def test_then_is_appended_when_the_group_ends_so(self, desk: Desk, ending: str) -> None:
        then = {
            each: (spec("ignored", each), spec("ignored", each, priority="high")) for each in ("done", "failed", "canceled")
        }
        grouped(desk, 1, then=then)
        desk.seal("g")
        if ending == "canceled":
            desk.cancel("m0")
        else:
            claim = desk.take()
            _ = desk.done(claim) if ending == "done" else desk.fail(claim)
        first, second = (derived("g", f"then:{ending}", n) for n in (0, 1))
        assert ids(desk.claim(ending, n=9)) == [second, first]
        assert desk.found(queue=ending) == [first, second]
        others = {"done", "failed", "canceled"} - {ending}
        assert all(desk.found(queue=other) == [] for other in others)

    def test_then_has_no_parent(self, desk: Desk) -> None:
        desk.open("g", then={"done": (spec("x", "t", payload=b"p", correlation_id="c"),)})
        desk.seal("g")
        job = desk.take("t").job
        assert (job.parent, job.group, job.payload, job.correlation_id) == (None, None, b"p", "c")

    def test_then_happens_once(self, desk: Desk) -> None:
        grouped(desk, 1, then={"failed": (spec("x", "t"),)})
        desk.seal("g")
        desk.fail(desk.take())
        desk.revive("m0")
        desk.fail(desk.take())
        assert desk.counts("t") == Counts(ready=1)

    def test_then_can_be_claimed_in_the_closing_batch(self, desk: Desk) -> None:
        desk.open("g", then={"done": (spec("x", "t"),)})
        desk.seal("g")
        assert len(desk.claim("t", n=9)) == 1

    def test_then_replaces_a_waiter_that_was_lost_before_it(self, desk: Desk) -> None:
        """First in, first out: the waiters of the group were put on the list before `then` was appended."""
        desk.open("g", then={"canceled": (spec("x", "t", key=replace("k")),)})
        desk.add("w", key=replace("k"), after=[whole_group("g")])
        desk.add("d", after=["w"])
        desk.abort("g")
        assert desk.at("w") == "canceled/dependency"
        assert desk.counts("t") == Counts(ready=1)
        assert desk.at("d") == "blocked"

    def test_then_replaces_a_waiter_that_it_woke(self, desk: Desk) -> None:
        desk.open("g", then={"done": (spec("x", "t", key=replace("k")),)})
        desk.add("w", key=replace("k"), after=[whole_group("g")])
        desk.seal("g")
        assert desk.at("w") == "canceled/superseded"
        assert desk.counts("t") == Counts(ready=1)

    def test_a_group_may_close_a_group(self, desk: Desk) -> None:
        desk.open("outer", then={"done": (spec("x", "t"),)})
        grouped(desk, 1)
        desk.add("w", group="outer", after=[whole_group("g")])
        desk.seal("outer")
        desk.seal("g")
        desk.done(desk.take())
        desk.done(desk.take())
        assert desk.counts("t") == Counts(ready=1)
