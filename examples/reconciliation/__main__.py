"""`python -m reconciliation` (in the directory `examples`): the whole application at work, for some
seconds."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="reconciliation-") as folder:
        # Minutes are short here: half an hour until the second look is a third of a second.
        os.environ |= {"RECONCILIATION_DB": str(Path(folder) / "work.db"), "RECONCILIATION_MINUTE": "0.01"}
        os.environ["RECONCILIATION_COOLDOWN"] = "2"
        from reconciliation.demo import run

        sys.exit(run())
