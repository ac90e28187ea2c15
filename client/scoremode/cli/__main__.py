"""Runs `python -m scoremode.cli`, which does the same as `ppl-client` if that script is not on PATH."""

import sys

from scoremode.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
