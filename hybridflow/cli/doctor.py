"""`hybridflow doctor`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.cli.command import add_command, add_recipe, say
from hybridflow.doctor.findings import Finding, exit_code, table
from hybridflow.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    from hybridflow.config.schema import RunConfig

DOCTOR = """\
examples:
  hybridflow doctor                              this machine
  hybridflow doctor --config-name tiny-moe-grpo  this machine and a recipe's requirements
  srun --nodes=4 --ntasks-per-node=1 hybridflow doctor --errors-only
  hybridflow doctor --nodes                      the same on every node of this shell's Slurm job
  hybridflow doctor --model downloads/Qwen3-8B   a model folder as a run would read it, no GPU
  hybridflow doctor --model downloads/Qwen3-8B --recipe grpo-qwen3-8b-1x8

Levels: ok; unused (with the reason); warning (slower or at risk); error (a run would fail). The
exit status is 1 if there is an error.
"""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "doctor",
        "check this machine's hardware and packages, or a model folder",
        DOCTOR,
        run,
    )
    add_recipe(parser, "also check this recipe's requirements", "--recipe")
    about = "check this model folder, or cached hub id, instead of the machine"
    parser.add_argument("--model", metavar="FOLDER", help=about)
    parser.add_argument(
        "--nodes", action="store_true", help="run on every node of the allocation, using srun"
    )
    parser.add_argument("--errors-only", action="store_true", help="hide checks that passed")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run `hybridflow doctor`. Returns exit status 1 if a run would fail."""
    if args.nodes:
        return _on_every_node(args)
    findings = _of_model(args) if args.model is not None else _of_machine(args)
    code = exit_code(findings)
    if args.errors_only:
        findings = [finding for finding in findings if finding.level in ("warning", "error")]
    name = os.environ.get("SLURMD_NODENAME")
    if args.json:
        print(json.dumps({"node": name, "findings": list(map(vars, findings))}))
    elif findings:
        say(f"{name}:\n{table(findings)}" if name else table(findings))
    return code


def _of_machine(args: argparse.Namespace) -> list[Finding]:
    from hybridflow.config.check import check
    from hybridflow.doctor import machine

    def checked() -> RunConfig:
        config = _load(args)
        check(config, "train")
        return config

    if args.config_name is None:
        return machine.examine()
    config, findings = machine.recipe_findings(checked)
    return findings + machine.examine(config)


def _of_model(args: argparse.Namespace) -> list[Finding]:
    """Check only the model folder. The recipe's data and this machine are not checked, because the
    machine may be used only to download the model.
    """
    from hybridflow.config import hub
    from hybridflow.doctor import machine, model

    folder = Path(args.model)
    if hub.is_hub_id(args.model):
        found = hub.cached(args.model, "model")
        if found is None:
            raise ConfigError(
                f"--model {args.model}: {hub.missing(args.model, 'model')}, or pass a folder"
            )
        folder = found
    if args.config_name is None:
        return model.examine(folder)
    args.overrides.append(f"model.path={folder}")
    config, findings = machine.recipe_findings(lambda: _load(args))
    return findings + model.examine(folder, config)


def _on_every_node(args: argparse.Namespace) -> int:
    if shutil.which("srun") is None or "SLURM_JOB_ID" not in os.environ:
        raise ResourceError("--nodes requires a Slurm job; run it under salloc or sbatch")
    words = [word for word in sys.argv[1:] if word != "--nodes"]
    command = [
        "srun",
        "--ntasks-per-node=1",
        "--overlap",
        sys.executable,
        "-P",
        "-m",
        "hybridflow.cli.main",
        *words,
    ]
    return subprocess.run(command, check=False).returncode


def _load(args: argparse.Namespace) -> RunConfig:
    from hybridflow.config.hub import located
    from hybridflow.config.load import load_config

    return located(load_config(args.config_name, args.overrides, args.config_dir))
