"""`hybridflow checkpoint inspect | verify | export | import`."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from hybridflow.cli.command import add_actions, add_command, say, say_error
from hybridflow.observe.jsonl import finite
from hybridflow.process.memory_limit import memory_limit

CHECKPOINT = """\
examples:
  hybridflow checkpoint inspect runs/tiny-moe-grpo                   the latest checkpoint of a run
  hybridflow checkpoint verify runs/tiny-moe-grpo/checkpoints/global_step_150
  hybridflow checkpoint export runs/tiny-moe-grpo exported --dtype bfloat16
                                                                     a Hugging Face folder, no GPU
  hybridflow checkpoint export runs/lora adapter --adapter           only the low-rank adapters
  hybridflow checkpoint import downloads/Qwen3-30B-A3B models/start  checked weights for model.path

CHECKPOINT is a run folder or its checkpoints/ (meaning the latest), one checkpoint, or its policy/
folder.
"""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def add(commands: Any) -> None:
    """Add the command and its four actions to the parser."""
    actions = add_actions(
        commands, "checkpoint", "inspect, verify, export and import checkpoints", CHECKPOINT
    )
    inspect = add_command(
        actions, "inspect", "print a checkpoint's properties and contents", CHECKPOINT, run_inspect
    )
    about = "read every file and compare it with the manifest"
    verify = add_command(actions, "verify", about, CHECKPOINT, run_verify)
    about = "write a checkpoint's model as a Hugging Face folder"
    export = add_command(actions, "export", about, CHECKPOINT, run_export)
    about = "check a Hugging Face folder and write it for model.path"
    bring = add_command(actions, "import", about, CHECKPOINT, run_import)
    for parser in (inspect, verify, export):
        about = "a run, a checkpoint or its policy folder"
        parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=about)
    bring.add_argument("source", type=Path, metavar="HF_FOLDER", help="config.json and safetensors")
    for parser in (export, bring):
        add = parser.add_argument
        add("out", type=Path, metavar="OUT", help="the folder to write; it must not exist")
        add(
            "--dtype",
            choices=("float32", "bfloat16", "float16"),
            help="dtype of the weights (default: unchanged)",
        )
        about = "maximum size of one file: 500M, 4Gi (default: 4Gi)"
        add("--max-shard-size", type=_size, default=4 << 30, metavar="SIZE", help=about)
        add(
            "--family",
            metavar="FILE.py:TYPE",
            help="your own parameter map of the model, in the format of model.family",
        )
    export.add_argument(
        "--adapter", action="store_true", help="only the low-rank adapters, in PEFT's format"
    )
    export.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="tokenizer files to copy (default: the run's)"
    )
    about = (
        "the model's original folder, from which weights not used in training are copied "
        "(default: the run's model.path)"
    )
    export.add_argument("--published", type=Path, metavar="DIR", help=about)
    for parser in (inspect, verify):
        parser.add_argument("--json", action="store_true", help="print JSON")


def run_inspect(args: argparse.Namespace) -> int:
    """Run `hybridflow checkpoint inspect`."""
    from hybridflow.saving import tools

    with memory_limit():
        figures = tools.inspect(tools.locate(args.checkpoint))
    if args.json:
        print(json.dumps(finite(figures), indent=2))
    else:
        say(tools.table(figures))
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """Run `hybridflow checkpoint verify`. Returns exit code 1 if a file is invalid."""
    with memory_limit():
        return _verify(args)


def _verify(args: argparse.Namespace) -> int:
    from hybridflow.saving import tools

    reports: list[dict[str, Any]] = []
    said = tools.incomplete_checkpoints(args.checkpoint)
    for problem in said:
        say_error(problem)
    for folder in tools.roles(args.checkpoint):
        manifest, found = tools.verify(folder, whole=folder.resolve() != args.checkpoint.resolve())
        # all roles report the driver's problems
        problems = [problem for problem in found if problem not in said]
        said += problems
        report = {
            "folder": str(folder),
            "files": len(manifest.files),
            "bytes": manifest.size,
            "problems": problems,
        }
        reports.append(report)
        if not problems and not args.json:
            say(
                f"{folder}: {len(manifest.files)} files, {manifest.size} bytes; all match the "
                f"manifest (step {manifest.step})"
            )
        for problem in problems:
            say_error(problem)
    if args.json:
        print(json.dumps(reports, indent=2))
    return 1 if said else 0


def run_export(args: argparse.Namespace) -> int:
    """Run `hybridflow checkpoint export`."""
    from hybridflow.models import use_family
    from hybridflow.saving import tools

    use_family(args.family)
    if args.adapter:
        return _report(tools.export_adapter(tools.locate(args.checkpoint), args.out, args.dtype))
    settings = (args.out, args.dtype, args.max_shard_size, args.tokenizer, args.published)
    folder = tools.locate(args.checkpoint)
    written = tools.export(folder, *settings)
    tools.add_card(folder, args.out)
    return _report(written)


def run_import(args: argparse.Namespace) -> int:
    """Run `hybridflow checkpoint import`."""
    from hybridflow.models import use_family
    from hybridflow.saving import tools

    use_family(args.family)
    return _report(tools.import_(args.source, args.out, args.dtype, args.max_shard_size))


def _report(written: Any) -> int:
    say(
        f"{written.folder}: {written.tensors} tensors in {written.files} files, {written.size} "
        "bytes of weights"
    )
    for line in written.lines:
        say(line)
    return 0


def _size(text: str) -> int:
    """Parse a size: `4Gi` -> 4294967296, `500M` -> 500000000."""
    found = re.fullmatch(r"(\d+)\s*([KMG]?I?)B?", text.strip().upper())
    if found is None or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"expected a size such as 500M or 4Gi, got {text!r}")
    return int(found[1]) * _UNITS[found[2]]
