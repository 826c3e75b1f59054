"""Until there is a PostgreSQL ledger, what needs one is left out."""

from __future__ import annotations

import importlib.util

_NEED_IT = ["test_clocks.py", "test_deploy_page.py", "test_outages.py"]
collect_ignore = [] if importlib.util.find_spec("towpath.ledger.postgres") else _NEED_IT
