"""`python -m scoremode.cli`, which is `ppl-client` where no script of that name is on PATH."""

import sys

from scoremode.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
