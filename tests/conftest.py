"""What several test folders share."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

# A test session in the background ignores Ctrl-C, and whatever it starts would too.
signal.signal(signal.SIGINT, signal.default_int_handler)
