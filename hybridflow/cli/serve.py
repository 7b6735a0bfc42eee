"""`hybridflow serve`."""

from __future__ import annotations

import argparse
from typing import Any

from hybridflow.cli.command import add_command, add_overrides, port_number, say, starting_engines
from hybridflow.process.importing import without_collection

SERVE = """\
MODEL is a run (its latest checkpoint), a checkpoint, an export, any Hugging Face folder, or a hub
id in this machine's cache. It is served at /v1/chat/completions and /v1/models. Clients must send
the API key: HYBRIDFLOW_API_KEY if it is set, otherwise a new key, which is printed. Nothing is
recorded.

examples:
  hybridflow serve runs/tiny-moe-grpo
  hybridflow serve models/Qwen3-0.6B --port 8080 rollout.max_total_tokens=65536
  hybridflow serve runs/mine rollout.engine=hf                 in this process
  curl http://127.0.0.1:8000/v1/chat/completions -H "Authorization: Bearer $HYBRIDFLOW_API_KEY" \\
    -d '{"messages": [{"role": "user", "content": "12+34="}]}'

A request's temperature, top_p, top_k, min_p and penalties are honoured; those it omits default to
rollout.val_sampling. SIGINT (Ctrl-C) and SIGTERM stop the server and all its processes.
"""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    about = "serve a checkpoint, an export or a model to OpenAI's clients"
    parser = add_command(commands, "serve", about, SERVE, run_serve)
    parser.add_argument("model", metavar="MODEL", help="a run, a checkpoint or a model folder")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on (default: 127.0.0.1, this machine only); requests and the key "
        "are not encrypted",
    )
    parser.add_argument(
        "--port",
        type=port_number,
        default=8000,
        help="port to listen on; 0 chooses a free one (default: 8000)",
    )
    about = "run the code that the run's config.yaml refers to: engines and model families"
    parser.add_argument("--run-code", action="store_true", help=about)
    add_overrides(parser, "settings that override the run's")


def run_serve(args: argparse.Namespace) -> int:
    """Run `hybridflow serve` until it is interrupted."""
    from hybridflow.inference.settings import Job, expected_engines, settings
    from hybridflow.inference.source import find

    source = find(args.model)
    try:
        with starting_engines(expected_engines(source, args.overrides)) as preload:
            with without_collection():
                config = settings(source, args.overrides, Job("serve", args.run_code))
                from hybridflow.inference.serving import Address, serve
                from hybridflow.observe.progress import Progress

            with Progress(0, "") as progress:
                serve(source, config, Address(args.host, args.port), preload, progress)
    except KeyboardInterrupt:
        say("stopped")
    return 0
