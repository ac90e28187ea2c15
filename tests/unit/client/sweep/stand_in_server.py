"""The fake server as a command, until tests take it from `fake_server`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from fake_server import ALLOWED, StandIn, main  # noqa: F401

if __name__ == "__main__":
    main()
