"""`hybridflow watch`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hybridflow.cli.command import add_command, port_number, require_run_folder, say
from hybridflow.process.memory_limit import memory_limit

WATCH = """\
examples:
  hybridflow watch runs/tiny-moe-grpo                      while it runs, or afterwards
  hybridflow watch runs/mine --with runs/before            the curves of both in the same charts

Prints an address for your browser. The address works only on this machine and contains a token;
from elsewhere, use ssh -L 8484:127.0.0.1:8484 HOST. The folder is read and never written, so it may
belong to a run on any machine that shares the disk, or to another user. Ctrl-C stops the page, not
the run.
"""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    about = "show a run in the browser while it runs: curves, alarms, all samples"
    parser = add_command(commands, "watch", about, WATCH, run_watch)
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="a run folder, for example runs/tiny-moe-grpo"
    )
    parser.add_argument(
        "--with",
        dest="other",
        type=Path,
        metavar="RUN_DIR",
        help="a second run folder to compare with",
    )
    parser.add_argument(
        "--port",
        type=port_number,
        default=8484,
        help="port on 127.0.0.1; 0 chooses a free one (default: 8484)",
    )


def run_watch(args: argparse.Namespace) -> int:
    """Run `hybridflow watch` until it is interrupted."""
    require_run_folder(args.run_dir)
    if args.other is not None:
        require_run_folder(args.other)
    from hybridflow.observe.watch.pages import Pages, Watched
    from hybridflow.observe.watch.server import WatchServer

    with memory_limit():
        other = Watched.of(args.other) if args.other is not None else None
        pages = Pages(Watched.of(args.run_dir), other)
        server = WatchServer(pages, args.port)
        say(server.address)
        try:
            server.serve()
        except KeyboardInterrupt:
            say("stopped")
    return 0
