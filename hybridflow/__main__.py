"""`python -m hybridflow`: the command line, for use when its script is not on PATH."""

import sys

from hybridflow.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
