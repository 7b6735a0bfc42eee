"""`hybridflow eval`."""

from __future__ import annotations

import argparse
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.cli.command import add_command, add_overrides, new_folder, say, starting_engines
from hybridflow.errors import ConfigError, DataError
from hybridflow.process.importing import without_collection

if TYPE_CHECKING:
    from hybridflow.inference.source import Source

EVAL = """\
MODEL is a run (its latest checkpoint), a checkpoint, an export, any Hugging Face folder, or a hub
id in this machine's cache. The settings of the run that wrote it are the defaults: data, reward,
chat template and sampling, so the result equals the run's own validation.

examples:
  hybridflow eval runs/tiny-moe-grpo/checkpoints/latest       the run's validation sets
  hybridflow eval runs/tiny-moe-grpo --data held-out.parquet  another set
  hybridflow eval models/Qwen3-0.6B --data math=math.parquet --data code=code.parquet \\
    data.val_sets.math.samples=16 data.val_sets.math.sampling.temperature=1.0 --k 1 8 16 \\
    data.val_sets.code.sampling.max_new_tokens=2048 data.max_response_length=2048
  hybridflow eval runs/mine rollout.engine=hf                 in this process, without a server

Settings of all sets: rollout.val_samples (answers per prompt), rollout.val_sampling.temperature,
.top_p and .max_new_tokens; of one set: data.val_sets.NAME.samples and .sampling. With
reward.path=FILE.py your own function scores the answers. Results are written to
RUN/eval/CHECKPOINT/ or eval/MODEL/: results.json, with a 95% interval for each value, config.yaml
and logs.
"""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    about = "evaluate a checkpoint, an export or a model on held-out prompts"
    parser = add_command(commands, "eval", about, EVAL, run_eval)
    parser.add_argument("model", metavar="MODEL", help="a run, a checkpoint or a model folder")
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="[NAME=]FILE",
        help="an evaluation set, in place of the run's; may be repeated",
    )
    parser.add_argument(
        "--k",
        type=_count,
        nargs="+",
        action="extend",
        default=[],
        metavar="K",
        help="values of k for pass@k and maj@k (default: 2, 4, 8, ... and all)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for the results; it must not exist"
    )
    parser.add_argument("--dump", action="store_true", help="also write every answer as parquet")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    about = "run the code that the run's config.yaml refers to: rewards, tools and other files"
    parser.add_argument("--run-code", action="store_true", help=about)
    add_overrides(parser, "settings that override the run's")


def run_eval(args: argparse.Namespace) -> int:
    """Run `hybridflow eval`."""
    since = time.monotonic()
    from hybridflow.inference.settings import Job, expected_engines, settings
    from hybridflow.inference.source import find

    source = find(args.model)
    out = _folder(source) if args.out is None else args.out
    if args.out is not None and args.out.exists():
        raise ConfigError(f"--out {args.out} already exists; choose another folder, or remove it")
    with starting_engines(expected_engines(source, args.overrides)) as preload:
        with without_collection():
            config = settings(source, args.overrides, Job("eval", args.run_code), args.data, out)
            from hybridflow.inference.evaluation import RESULTS, Wanted, check_ks, evaluate, table
            from hybridflow.observe.progress import Progress

        check_ks(config, args.k)
        is_first = not out.parent.exists()
        out = new_folder(out.parent, out.name)
        wanted = Wanted(out.resolve(), sorted(set(args.k)), args.dump, since)
        with Progress(0, "", enabled=not args.json) as progress:
            try:
                results = evaluate(source, config, wanted, preload, progress)
            except (ConfigError, DataError):
                shutil.rmtree(out)  # nothing was evaluated
                if is_first:
                    with suppress(OSError):  # another evaluation has written to it meanwhile
                        out.parent.rmdir()
                raise
    if args.json:
        say((out / RESULTS).read_text(encoding="utf-8").rstrip())
    else:
        say(f"\n{table(results)}\n\nresults: {out / RESULTS}")
    return 0


def _folder(source: Source) -> Path:
    """Return the default folder for the results."""
    from hybridflow.saving.model_card import EVALUATIONS

    if source.run is not None:
        return source.run / EVALUATIONS / source.name
    return Path(EVALUATIONS) / source.name


def _count(text: str) -> int:
    """Parse the number of answers per prompt."""
    if not text.isascii() or not text.isdigit() or not int(text[:9]) > 0:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text[:9])
