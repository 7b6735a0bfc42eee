"""Gives commands a folder of somebody else under limits, and prints as JSON what each returned and
printed."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import sys
import traceback

from hybridflow.cli.main import main

BYTES = 1 << 30
SECONDS = 5


def run(words: list[str]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command line."""
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as error:
            code = int(error.code or 0)
        except BaseException:
            code = -1
            traceback.print_exc(file=err)
    return code, out.getvalue(), err.getvalue()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    found = {}
    for line in sys.argv[1:]:
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        limit = int(used) + 1 + SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        found[line] = run(json.loads(line))
    print(json.dumps(found))
