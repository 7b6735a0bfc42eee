"""`hybridflow doctor`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from typing import Any

from hybridflow.cli.command import add_command, add_recipe
from hybridflow.errors import ResourceError

DOCTOR = """\
examples:
  hybridflow doctor                                     this machine
  hybridflow doctor --config-name tiny-moe-grpo         and what this recipe needs
  srun --nodes=4 --ntasks-per-node=1 hybridflow doctor --errors-only
  hybridflow doctor --nodes                             the same on every node of the Slurm job this shell is in

Levels: ok; unused, with the reason; warning, slower or at risk; error, a run would end. The exit status is 1 when
there is an error.
"""


def add(commands: Any) -> None:
    """Put the command into the parser."""
    parser = add_command(commands, "doctor", "what of this machine a run would use, and what not and why", DOCTOR, run)
    add_recipe(parser, "also check what this recipe needs", "--recipe")
    parser.add_argument("--nodes", action="store_true", help="on every node of the allocation, by srun")
    parser.add_argument("--errors-only", action="store_true", help="leave out what is in order")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """`hybridflow doctor`; exit status 1 when a run would end."""
    if args.nodes:
        return _on_every_node(args)
    from hybridflow.launch import doctor

    config = None
    findings: list[doctor.Finding] = []
    if args.config_name is not None:
        config, findings = doctor.recipe_findings(lambda: _load(args))
    findings += doctor.examine(config)
    code = doctor.exit_code(findings)
    if args.errors_only:
        findings = [finding for finding in findings if finding.level in ("warning", "error")]
    name = os.environ.get("SLURMD_NODENAME")
    if args.json:
        print(json.dumps({"node": name, "findings": [vars(finding) for finding in findings]}))
    elif findings:
        print(f"{name}:\n{doctor.table(findings)}" if name else doctor.table(findings), flush=True)
    return code


def _on_every_node(args: argparse.Namespace) -> int:
    if shutil.which("srun") is None or "SLURM_JOB_ID" not in os.environ:
        raise ResourceError("--nodes asks the nodes of a Slurm job: run it under salloc or sbatch")
    words = [word for word in sys.argv[1:] if word != "--nodes"]
    command = ["srun", "--ntasks-per-node=1", "--overlap", sys.executable, "-m", "hybridflow.cli.main", *words]
    return subprocess.run(command, check=False).returncode


def _load(args: argparse.Namespace) -> Any:
    from hybridflow.config.check import check
    from hybridflow.config.load import load_config

    config = load_config(args.config_name, args.overrides, args.config_dir)
    check(config, "train")
    return config
