"""The commands for groups, and the callbacks of a group (`Open.then`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

import msgspec
from msgspec.structs import force_setattr, replace

from towpath.core import checks
from towpath.core.ids import callback_id
from towpath.core.job import Reason, Spec, State
from towpath.core.results import OnFailure
from towpath.errors import InvalidInput

STOP_REASONS: Mapping[OnFailure, Reason] = {
    OnFailure.ABORT: Reason.ABORTED,
    OnFailure.STOP: Reason.STOPPED,
}
"""The reason for which the unfinished members end when a member fails; none in a group that continues."""


class _OfGroup(msgspec.Struct, frozen=True, gc=False):
    group: str

    def __post_init__(self) -> None:
        checks.text("group", self.group, least=1)


class Open(_OfGroup, frozen=True, gc=False, tag="open"):
    """`then`: for each outcome, the specs that are appended when the group ends with it. Their ids are
    derived; `after` names specs of the same list by the ids given there. The group of such a spec is opened
    with them and sealed, unless it is open."""

    on_failure: OnFailure = OnFailure.CONTINUE
    then: Mapping[str, tuple[Spec, ...]] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on_failure not in OnFailure._value2member_map_:
            raise InvalidInput(field="on_failure", value=self.on_failure, expected="continue, abort or stop")
        force_setattr(self, "on_failure", OnFailure(self.on_failure))
        for ending, specs in self.then.items():
            if ending not in ("done", "failed", "canceled"):
                raise InvalidInput(
                    field="then", value=ending, expected="for one of done, failed and canceled"
                )
            _check_callbacks(f"then[{ending}]", self.group, checks.all_of(f"then[{ending}]", specs, Spec))
        total = sum(len(spec.payload) for specs in self.then.values() for spec in specs)
        checks.whole("payloads of then", total, most=checks.MAX_PAYLOAD)


def _check_callbacks(field: str, group: str, specs: Sequence[Spec]) -> None:
    ids = Counter([spec.id for spec in specs])
    for spec in specs:
        if spec.blob is not None:
            raise InvalidInput(field=field, value=spec.id, expected="a spec without a blob")
        if spec.group == group:
            raise InvalidInput(field=field, value=spec.id, expected="a spec of another group")
        for after in spec.after:
            if after.group or ids[after.id] != 1:
                expected = "a spec that waits only for specs of the same list, each with its own id"
                raise InvalidInput(field=field, value=spec.id, expected=expected)
    related = [spec for spec in specs if spec.after]
    try:
        TopologicalSorter({spec.id: [after.id for after in spec.after] for spec in related}).prepare()
    except CycleError as error:
        expected = "a list without a cycle of dependencies"
        raise InvalidInput(field=field, value=error.args[1], expected=expected) from None


def callbacks(group: str, outcome: State, specs: Sequence[Spec]) -> list[Spec]:
    """The specs that follow a group which ends with `outcome`, with their derived ids."""
    ids = [callback_id(group, outcome, n) for n in range(len(specs))]
    names = {spec.id: id for spec, id in zip(specs, ids, strict=True)}
    return [
        replace(spec, id=id, after=tuple([replace(after, id=names[after.id]) for after in spec.after]))
        for spec, id in zip(specs, ids, strict=True)
    ]


class Seal(_OfGroup, frozen=True, gc=False, tag="seal"):
    pass


class Unseal(_OfGroup, frozen=True, gc=False, tag="unseal"):
    """Pause a sealed group: its waiting jobs wait for another `Seal`. For a paused group: set the reason."""

    why: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.optional_text("why", self.why, 1000)


class Abort(_OfGroup, frozen=True, gc=False, tag="abort"):
    """End the waiting members of a group and ask the running ones to stop. With `stop` running members are
    not interrupted: each ends as its handler does, but does not run again. An abort without `stop` also asks
    the running members of a group that is stopping."""

    stop: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.stop) is not bool:
            raise InvalidInput(field="stop", value=self.stop, expected="true or false")

    @property
    def reason(self) -> Reason:
        return Reason.STOPPED if self.stop else Reason.ABORTED
