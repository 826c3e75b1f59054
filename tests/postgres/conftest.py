"""Until there is a PostgreSQL ledger, what needs one is left out."""

from __future__ import annotations

import importlib.util

collect_ignore = [] if importlib.util.find_spec("towpath.ledger.postgres") else ["test_outages.py", "test_clocks.py"]
