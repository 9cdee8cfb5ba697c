"""Makes the parts of the training script importable, as they are when it is run by its path."""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLES = str(Path(__file__).parents[3] / "examples")
if EXAMPLES not in sys.path:
    sys.path.append(EXAMPLES)
