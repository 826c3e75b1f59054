"""Notes: compare and set, time to live, locks."""

from __future__ import annotations

from towpath.core.checks import HOUR, SECOND
from towpath.core.commands import Note, Noted, SetPart, SetQueue
from towpath.core.views import NoteView
from towpath.errors import NoteConflict
from towpath.testing.clock import START
from towpath.testing.suite.desk import Desk, Suite


class NoteSuite(Suite):
    """Small records with a version and a fence."""

    def test_write_and_read(self, desk: Desk) -> None:
        noted = desk.write("k", b"\0value")
        assert noted == Noted("k", 1, noted.fence)
        assert desk.ledger.note("k", desk.now) == NoteView("k", b"\0value", 1, noted.fence, None)
        assert desk.ledger.note("nothing", desk.now) is None

    def test_versions_come_from_one_counter(self, desk: Desk) -> None:
        assert [desk.write(key).version for key in ("k", "l", "k", "m")] == [1, 2, 3, 4]

    def test_a_refused_note_uses_no_version(self, desk: Desk) -> None:
        desk.refusal(NoteConflict, Note(key="k", value=b"v", expect=5))
        assert desk.write("k").version == 1

    def test_only_if_there_is_none(self, desk: Desk) -> None:
        desk.write("k", b"1", expect=0)
        error = desk.refusal(NoteConflict, Note(key="k", value=b"2", expect=0))
        assert error.details == {"key": "k", "version": 1, "expect": 0}

    def test_only_at_that_version(self, desk: Desk) -> None:
        first = desk.write("k", b"1")
        second = desk.write("k", b"2", expect=first.version)
        error = desk.refusal(NoteConflict, Note(key="k", value=b"3", expect=first.version))
        assert error.details == {"key": "k", "version": second.version, "expect": first.version}

    def test_an_absent_note_is_at_version_zero(self, desk: Desk) -> None:
        error = desk.refusal(NoteConflict, Note(key="k", value=b"3", expect=7))
        assert error.details == {"key": "k", "version": 0, "expect": 7}

    def test_the_fence_is_fixed_while_the_note_lives(self, desk: Desk) -> None:
        fences = {desk.write("k", str(n).encode(), ttl=SECOND).fence for n in range(5)}
        assert len(fences) == 1

    def test_the_fence_grows_each_time_it_is_made_anew(self, desk: Desk) -> None:
        first = desk.write("k")
        desk.write("other")
        desk.write("k", None)
        second = desk.write("k")
        assert second.fence > first.fence

    def test_deleting_answers_what_it_had(self, desk: Desk) -> None:
        noted = desk.write("k")
        assert desk.write("k", None) == noted
        assert desk.ledger.note("k", desk.now) is None
        with desk.unchanged():
            assert desk.write("k", None) == Noted("k", 0, 0)

    def test_deleting_only_at_that_version(self, desk: Desk) -> None:
        noted = desk.write("k")
        error = desk.refusal(NoteConflict, Note(key="k", value=None, expect=noted.version + 1))
        assert error.details["version"] == noted.version
        desk.write("k", None, expect=noted.version)
        desk.refusal(NoteConflict, Note(key="k", value=None, expect=noted.version))
        assert desk.write("k", None, expect=0) == Noted("k", 0, 0)

    def test_a_time_to_live(self, desk: Desk) -> None:
        desk.write("k", b"v", ttl=SECOND)
        note = desk.ledger.note("k", START + SECOND - 1)
        assert note is not None
        assert note.expires_at == START + SECOND
        assert desk.ledger.note("k", START + SECOND) is None

    def test_a_write_sets_the_time_anew(self, desk: Desk) -> None:
        desk.write("k", ttl=SECOND)
        desk.jump(SECOND // 2)
        desk.write("k", ttl=SECOND)
        note = desk.ledger.note("k", desk.now)
        assert note is not None
        assert note.expires_at == desk.now + SECOND
        desk.write("k")
        note = desk.ledger.note("k", desk.now)
        assert note is not None
        assert note.expires_at is None

    def test_an_expired_note_counts_as_absent(self, desk: Desk) -> None:
        first = desk.write("k", b"1", ttl=SECOND)
        desk.jump(SECOND)
        error = desk.refusal(NoteConflict, Note(key="k", value=b"2", expect=first.version))
        assert error.details["version"] == 0
        second = desk.write("k", b"2", expect=0)
        assert second.fence > first.fence

    def test_an_expired_note_has_nothing_to_delete(self, desk: Desk) -> None:
        desk.write("k", ttl=SECOND)
        desk.jump(SECOND)
        assert desk.write("k", None) == Noted("k", 0, 0)

    def test_a_lock(self, desk: Desk) -> None:
        mine = desk.write("lock", b"me", expect=0, ttl=10 * SECOND)
        desk.refusal(NoteConflict, Note(key="lock", value=b"you", expect=0, ttl=10 * SECOND))
        desk.jump(5 * SECOND)
        renewed = desk.write("lock", b"me", expect=mine.version, ttl=10 * SECOND)
        assert renewed.fence == mine.fence
        desk.jump(10 * SECOND)
        yours = desk.write("lock", b"you", expect=0, ttl=10 * SECOND)
        assert yours.fence > mine.fence
        desk.refusal(NoteConflict, Note(key="lock", value=b"me", expect=renewed.version, ttl=10 * SECOND))

    def test_the_fence_outlives_release_and_sweep(self, desk: Desk) -> None:
        fence = 0
        for n in range(4):
            noted = desk.write("lock", expect=0, ttl=SECOND)
            assert noted.fence > fence
            fence = noted.fence
            if n % 2:
                desk.write("lock", None, expect=noted.version)
            desk.jump(2 * HOUR)
            desk.upkeep()

    def test_gates_are_set_with_the_note(self, desk: Desk) -> None:
        desk.add("a", part="p")
        gates = (
            SetPart(queue="q", part="p", cap=2),
            SetQueue(queue="q", paused=True, why="x"),
            SetPart(queue="q", part="p", cap=1),
        )
        desk.do(Noted, Note(key="k", value=b"1", expect=0, gates=gates))
        assert (desk.part("p").cap, desk.ledger.queues()["q"].why) == (1, "x")
        desk.do(Noted, Note(key="k", value=None, gates=(SetPart(queue="q", part="p", cap=None),)))
        assert (desk.part("p").cap, desk.ledger.note("k", desk.now)) == (None, None)

    def test_a_refused_note_sets_no_gates(self, desk: Desk) -> None:
        with desk.unchanged():
            desk.refusal(
                NoteConflict,
                Note(key="k", value=b"1", expect=3, gates=(SetPart(queue="q", part="p", cap=1),)),
            )

    def test_an_empty_value_is_a_value(self, desk: Desk) -> None:
        desk.write("k", b"")
        note = desk.ledger.note("k", desk.now)
        assert note is not None
        assert note.value == b""

    def test_a_large_value(self, desk: Desk) -> None:
        desk.write("k", b"x" * 256 * 1024)
        note = desk.ledger.note("k", desk.now)
        assert note is not None
        assert len(note.value) == 256 * 1024
