from __future__ import annotations

from towpath.core.job import Key, Spec, runs_of


def spec(id: str, **fields: object) -> Spec:
    return Spec(**{"id": id, "queue": "q", **fields})  # type: ignore[arg-type]


def test_runs_differ_in_nothing_but_id_and_payload() -> None:
    one = [spec("a"), spec("b", payload=b"1"), spec("c", payload=b"22")]
    two = [spec("d", priority=1), spec("e", priority=1)]
    three = [spec("f")]
    four = [spec("g", headers={"a": "b"}), spec("h", headers={"a": "b"})]
    five = [spec("i", key=Key("k"))]
    assert runs_of([*one, *two, *three, *four, *five]) == [one, two, three, four, five]
    assert runs_of([]) == []


def test_looking_for_runs_changes_no_spec() -> None:
    given = [spec("a", payload=b"1"), spec("b", payload=b"2"), spec("c", priority=1)]
    copies = [spec("a", payload=b"1"), spec("b", payload=b"2"), spec("c", priority=1)]
    runs_of(given)
    assert given == copies
