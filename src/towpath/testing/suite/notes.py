"""Notes: compare and set, time to live, locks."""

from __future__ import annotations

from towpath.core.checks import HOUR, SECOND
from towpath.core.commands import Note, Noted, SetPart, SetQueue
from towpath.core.views import NoteView
from towpath.errors import NoteConflict
from towpath.testing.clock import START
from towpath.testing.suite.harness import Harness, Suite


class NoteSuite(Suite):
    """Small records with a version and a fence."""

    def test_write_and_read(self, harness: Harness) -> None:
        noted = harness.write("k", b"\0value")
        assert noted == Noted("k", 1, noted.fence)
        assert harness.ledger.note("k", harness.now) == NoteView("k", b"\0value", 1, noted.fence, None)
        assert harness.ledger.note("nothing", harness.now) is None

    def test_versions_come_from_one_counter(self, harness: Harness) -> None:
        assert [harness.write(key).version for key in ("k", "l", "k", "m")] == [1, 2, 3, 4]

    def test_a_refused_note_uses_no_version(self, harness: Harness) -> None:
        harness.refusal(NoteConflict, Note(key="k", value=b"v", expect=5))
        assert harness.write("k").version == 1

    def test_only_if_there_is_none(self, harness: Harness) -> None:
        harness.write("k", b"1", expect=0)
        error = harness.refusal(NoteConflict, Note(key="k", value=b"2", expect=0))
        assert error.details == {"key": "k", "version": 1, "expect": 0}

    def test_only_at_that_version(self, harness: Harness) -> None:
        first = harness.write("k", b"1")
        second = harness.write("k", b"2", expect=first.version)
        error = harness.refusal(NoteConflict, Note(key="k", value=b"3", expect=first.version))
        assert error.details == {"key": "k", "version": second.version, "expect": first.version}

    def test_an_absent_note_is_at_version_zero(self, harness: Harness) -> None:
        error = harness.refusal(NoteConflict, Note(key="k", value=b"3", expect=7))
        assert error.details == {"key": "k", "version": 0, "expect": 7}

    def test_the_fence_is_fixed_while_the_note_lives(self, harness: Harness) -> None:
        fences = {harness.write("k", str(n).encode(), ttl=SECOND).fence for n in range(5)}
        assert len(fences) == 1

    def test_the_fence_grows_each_time_it_is_made_anew(self, harness: Harness) -> None:
        first = harness.write("k")
        harness.write("other")
        harness.write("k", None)
        second = harness.write("k")
        assert second.fence > first.fence

    def test_deleting_answers_what_it_had(self, harness: Harness) -> None:
        noted = harness.write("k")
        assert harness.write("k", None) == noted
        assert harness.ledger.note("k", harness.now) is None
        with harness.unchanged():
            assert harness.write("k", None) == Noted("k", 0, 0)

    def test_deleting_only_at_that_version(self, harness: Harness) -> None:
        noted = harness.write("k")
        error = harness.refusal(NoteConflict, Note(key="k", value=None, expect=noted.version + 1))
        assert error.details["version"] == noted.version
        harness.write("k", None, expect=noted.version)
        harness.refusal(NoteConflict, Note(key="k", value=None, expect=noted.version))
        assert harness.write("k", None, expect=0) == Noted("k", 0, 0)

    def test_a_time_to_live(self, harness: Harness) -> None:
        harness.write("k", b"v", ttl=SECOND)
        note = harness.ledger.note("k", START + SECOND - 1)
        assert note is not None
        assert note.expires_at == START + SECOND
        assert harness.ledger.note("k", START + SECOND) is None

    def test_a_write_sets_the_time_anew(self, harness: Harness) -> None:
        harness.write("k", ttl=SECOND)
        harness.jump(SECOND // 2)
        harness.write("k", ttl=SECOND)
        note = harness.ledger.note("k", harness.now)
        assert note is not None
        assert note.expires_at == harness.now + SECOND
        harness.write("k")
        note = harness.ledger.note("k", harness.now)
        assert note is not None
        assert note.expires_at is None

    def test_an_expired_note_counts_as_absent(self, harness: Harness) -> None:
        first = harness.write("k", b"1", ttl=SECOND)
        harness.jump(SECOND)
        error = harness.refusal(NoteConflict, Note(key="k", value=b"2", expect=first.version))
        assert error.details["version"] == 0
        second = harness.write("k", b"2", expect=0)
        assert second.fence > first.fence

    def test_an_expired_note_has_nothing_to_delete(self, harness: Harness) -> None:
        harness.write("k", ttl=SECOND)
        harness.jump(SECOND)
        assert harness.write("k", None) == Noted("k", 0, 0)

    def test_a_lock(self, harness: Harness) -> None:
        mine = harness.write("lock", b"me", expect=0, ttl=10 * SECOND)
        harness.refusal(NoteConflict, Note(key="lock", value=b"you", expect=0, ttl=10 * SECOND))
        harness.jump(5 * SECOND)
        renewed = harness.write("lock", b"me", expect=mine.version, ttl=10 * SECOND)
        assert renewed.fence == mine.fence
        harness.jump(10 * SECOND)
        yours = harness.write("lock", b"you", expect=0, ttl=10 * SECOND)
        assert yours.fence > mine.fence
        harness.refusal(NoteConflict, Note(key="lock", value=b"me", expect=renewed.version, ttl=10 * SECOND))

    def test_the_fence_outlives_release_and_sweep(self, harness: Harness) -> None:
        fence = 0
        for n in range(4):
            noted = harness.write("lock", expect=0, ttl=SECOND)
            assert noted.fence > fence
            fence = noted.fence
            if n % 2:
                harness.write("lock", None, expect=noted.version)
            harness.jump(2 * HOUR)
            harness.upkeep()

    def test_gates_are_set_with_the_note(self, harness: Harness) -> None:
        harness.add("a", part="p")
        gates = (
            SetPart(queue="q", part="p", cap=2),
            SetQueue(queue="q", paused=True, why="x"),
            SetPart(queue="q", part="p", cap=1),
        )
        harness.do(Noted, Note(key="k", value=b"1", expect=0, gates=gates))
        assert (harness.part("p").cap, harness.ledger.queues()["q"].why) == (1, "x")
        harness.do(Noted, Note(key="k", value=None, gates=(SetPart(queue="q", part="p", cap=None),)))
        assert (harness.part("p").cap, harness.ledger.note("k", harness.now)) == (None, None)

    def test_a_refused_note_sets_no_gates(self, harness: Harness) -> None:
        with harness.unchanged():
            harness.refusal(
                NoteConflict,
                Note(key="k", value=b"1", expect=3, gates=(SetPart(queue="q", part="p", cap=1),)),
            )

    def test_an_empty_value_is_a_value(self, harness: Harness) -> None:
        harness.write("k", b"")
        note = harness.ledger.note("k", harness.now)
        assert note is not None
        assert note.value == b""

    def test_a_large_value(self, harness: Harness) -> None:
        harness.write("k", b"x" * 256 * 1024)
        note = harness.ledger.note("k", harness.now)
        assert note is not None
        assert len(note.value) == 256 * 1024
