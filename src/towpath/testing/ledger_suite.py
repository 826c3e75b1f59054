"""The definition of a ledger, as one class of tests.

    class TestMyLedger(LedgerSuite):
        @pytest.fixture
        def ledger(self, clock: ManualClock) -> Iterator[Ledger]:
            with checked(MyLedger(clock)) as ledger:
                yield ledger

`clock` is at `START`; the tests pass every time explicitly and never sleep. `checked` asserts after each test
that `check()` returns no inconsistency.
"""

from __future__ import annotations

from towpath.testing.suite.append import AppendSuite, CapacitySuite, DependencySuite
from towpath.testing.suite.attempts import AttemptsSuite
from towpath.testing.suite.bad_input import BadInputSuite
from towpath.testing.suite.batches import BatchSuite, RepeatSuite
from towpath.testing.suite.blobs import BlobSuite, BlobSweepSuite
from towpath.testing.suite.bulk import CancelSuite, PurgeSuite
from towpath.testing.suite.callbacks import CallbackSuite
from towpath.testing.suite.claim import ClaimSuite, QueueGateSuite, SuspectSuite
from towpath.testing.suite.groups import CascadeSuite, GroupListSuite, GroupSuite, ThenSuite
from towpath.testing.suite.harness import Harness, Suite, checked
from towpath.testing.suite.hasten import HastenSuite
from towpath.testing.suite.keys import ReplaceSuite, SerialSuite, UniqueSuite
from towpath.testing.suite.notes import NoteSuite
from towpath.testing.suite.parts import PartSuite, QuotaSuite
from towpath.testing.suite.pauses import PauseSuite
from towpath.testing.suite.proxies import ProxySuite
from towpath.testing.suite.reads import ExplainSuite, ReadSuite
from towpath.testing.suite.records import RecordSuite
from towpath.testing.suite.relations import RelationSuite
from towpath.testing.suite.resolve import ResolveSuite
from towpath.testing.suite.revive import ReopenSuite, ReviveSuite
from towpath.testing.suite.settle import RenewSuite, SettleSuite
from towpath.testing.suite.stops import StopSuite
from towpath.testing.suite.unused_queues import UnusedQueueSuite
from towpath.testing.suite.upkeep import DeadOwnerSuite, DueSuite, ReapSuite, UpkeepSuite

__all__ = ["SUITES", "Harness", "LedgerSuite", "checked"]

SUITES: tuple[type[Suite], ...] = (
    BatchSuite,
    RepeatSuite,
    AppendSuite,
    DependencySuite,
    CapacitySuite,
    UniqueSuite,
    ReplaceSuite,
    SerialSuite,
    ClaimSuite,
    SuspectSuite,
    HastenSuite,
    QueueGateSuite,
    PartSuite,
    QuotaSuite,
    SettleSuite,
    RenewSuite,
    CascadeSuite,
    GroupSuite,
    GroupListSuite,
    PauseSuite,
    ThenSuite,
    CallbackSuite,
    StopSuite,
    CancelSuite,
    PurgeSuite,
    ReviveSuite,
    ReopenSuite,
    ResolveSuite,
    ProxySuite,
    NoteSuite,
    ReapSuite,
    UpkeepSuite,
    UnusedQueueSuite,
    DeadOwnerSuite,
    DueSuite,
    ReadSuite,
    RelationSuite,
    ExplainSuite,
    RecordSuite,
    AttemptsSuite,
    BadInputSuite,
    BlobSuite,
    BlobSweepSuite,
)


class LedgerSuite(
    BatchSuite,
    RepeatSuite,
    AppendSuite,
    DependencySuite,
    CapacitySuite,
    UniqueSuite,
    ReplaceSuite,
    SerialSuite,
    ClaimSuite,
    SuspectSuite,
    HastenSuite,
    QueueGateSuite,
    PartSuite,
    QuotaSuite,
    SettleSuite,
    RenewSuite,
    CascadeSuite,
    GroupSuite,
    GroupListSuite,
    PauseSuite,
    ThenSuite,
    CallbackSuite,
    StopSuite,
    CancelSuite,
    PurgeSuite,
    ReviveSuite,
    ReopenSuite,
    ResolveSuite,
    ProxySuite,
    NoteSuite,
    ReapSuite,
    UpkeepSuite,
    UnusedQueueSuite,
    DeadOwnerSuite,
    DueSuite,
    ReadSuite,
    RelationSuite,
    ExplainSuite,
    RecordSuite,
    AttemptsSuite,
    BadInputSuite,
    BlobSuite,
    BlobSweepSuite,
):
    """Every rule of `docs/ledger-rules.md`."""


def _no_test_hides_another() -> None:
    seen: dict[str, type[Suite]] = {}
    for suite in SUITES:
        for name in vars(suite):
            if name.startswith("test_"):
                assert name not in seen, f"{name} is in {seen[name].__name__} and in {suite.__name__}"
                seen[name] = suite


_no_test_hides_another()
