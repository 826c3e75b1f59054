"""`python -m reconciliation` (in the directory `examples`) runs the whole application for some seconds."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="reconciliation-") as folder:
        # A minute lasts 10 ms here, so 30 minutes until the second request are 0.3 s.
        os.environ |= {"RECONCILIATION_DB": str(Path(folder) / "work.db"), "RECONCILIATION_MINUTE": "0.01"}
        os.environ["RECONCILIATION_COOLDOWN"] = "2"
        from reconciliation.demo import run

        sys.exit(run())
