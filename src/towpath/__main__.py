"""`python -m towpath` is `towpath`."""

from __future__ import annotations

import sys

from towpath.cli import main

if __name__ == "__main__":
    sys.exit(main())
