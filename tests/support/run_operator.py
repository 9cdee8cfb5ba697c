"""`python -m tests.support.run_operator …` is `moe-operator …` run from the sources."""

from __future__ import annotations

import sys

from moe_operator import main

if __name__ == "__main__":
    sys.exit(main.main())
