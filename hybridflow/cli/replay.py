"""`hybridflow replay`."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.cli.command import add_command, run_job, say
from hybridflow.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from hybridflow.config.schema import RunConfig

REPLAY = """\
examples:
  hybridflow replay runs/tiny-moe-grpo 3                     step 3, from its dump and checkpoint 2
  hybridflow replay runs/tiny-moe-grpo 3 cluster=in-process  in one process, so breakpoint() works
  hybridflow replay runs/tiny-moe-grpo 3 actor.backend=fsdp  with another setting
  hybridflow replay runs/mine 3 --run-code                   run the code that config.yaml refers to

The run must have dumped the step (trainer.dump_rollouts_every_steps) and kept the checkpoint before
it (trainer.save_every_steps, trainer.max_checkpoints_to_keep). The replay is a separate run in
RUN_DIR/replay/; nothing else in RUN_DIR changes. The exit status is 0 if all values are bitwise
identical, and 1 if any differs.
"""


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands, "replay", "repeat a step of a run from its dump and compare", REPLAY, run_replay
    )
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="a run folder, for example runs/tiny-moe-grpo"
    )
    parser.add_argument("step", type=int, metavar="STEP", help="the step to repeat, starting at 1")
    about = (
        "run the code that config.yaml in RUN_DIR refers to: rewards, tools, programs and other "
        "Python files"
    )
    parser.add_argument("--run-code", action="store_true", help=about)
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that override the run's"
    )


def run_replay(args: argparse.Namespace) -> int:
    """Run `hybridflow replay`."""
    run_dir: Path = args.run_dir
    from hybridflow.config.check import check
    from hybridflow.observe.rollouts import dump_path, list_dumps

    _require_config(run_dir / "config.yaml")
    dump = dump_path(run_dir / "rollouts", args.step)
    if not dump.is_file():
        there = ", ".join(str(step) for step, _ in list_dumps(run_dir / "rollouts")) or "none"
        raise ConfigError(f"{dump}: no such dump (steps with a dump: {there})")
    folder = _new_folder(run_dir / "replay", args.step)
    own = {
        "name": folder.name,
        "output_dir": str(folder.parent),
        "trainer.rollouts_from": str(dump),
        "trainer.dump_rollouts_every_steps": 1,
        "trainer.export": "false",
        "trainer.report": "false",
    }
    try:
        run = _load(
            run_dir / "config.yaml",
            [*args.overrides, *(f"{key}={value}" for key, value in own.items())],
        )
        if not args.run_code:
            _refuse_code(run, run_dir, args.overrides)
        check(run, "train")
        _link_checkpoint(run, run_dir, folder, args.step - 1)
    except BaseException:
        folder.rmdir()
        raise
    return _replay(run, run_dir, folder, args.step)


def _require_config(file: Path) -> None:
    """Raise ConfigError unless the file is a valid run configuration. It must contain only plain
    values, with no defaults list and no interpolations, because interpolations could read
    environment variables."""
    from hybridflow.config.outside_yaml import read_outside_yaml

    try:
        text, values = read_outside_yaml(file)
    except FileNotFoundError as error:
        raise ConfigError(f"{file.parent} is not a run folder: {file.name} not found") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a valid run configuration: {error}") from error
    if "defaults" in values or "${" in text:
        what = "a defaults list" if "defaults" in values else "an interpolation ${...}"
        raise ConfigError(f"{file} is not a valid run configuration: it contains {what}")


def _load(file: Path, words: Sequence[str]) -> RunConfig:
    """Load the configuration with these settings. Other files in its folder are not used as recipes
    or groups."""
    from hybridflow.config.load import load_config

    with tempfile.TemporaryDirectory() as alone:
        shutil.copyfile(file, Path(alone) / "config.yaml")
        return load_config("config", words, Path(alone))


def _refuse_code(run: RunConfig, run_dir: Path, overrides: Sequence[str]) -> None:
    """Raise ConfigError if the replay would execute code that config.yaml refers to but the command
    line does not."""
    from hybridflow.config.own_entries import code_of

    given = {word.lstrip("+").partition("=")[0] for word in overrides}
    if found := [f"{key}={value}" for key, value in code_of(run) if key not in given]:
        raise ConfigError(
            f"the replay would run code that {run_dir / 'config.yaml'} refers to: "
            f"{', '.join(found)}. Review it, and pass --run-code to allow it"
        )


def _replay(run: RunConfig, run_dir: Path, folder: Path, step: int) -> int:
    from hybridflow.observe.compare import compare_step, describe

    run_job("train", run)
    differences = compare_step(run_dir, folder, step)
    say(f"\nstep {step} of {run_dir} -> {folder}\n{describe(differences)}")
    return int(any(one.differing for one in differences))


def _new_folder(parent: Path, step: int) -> Path:
    """Create a new folder for the replay."""
    number = 0
    while True:
        folder = parent / (f"step_{step:06d}" + (f".{number}" if number else ""))
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        return folder


def _link_checkpoint(run: RunConfig, run_dir: Path, folder: Path, step: int) -> None:
    """Let the replay start from the run's checkpoint after `step`, or from scratch if `step` is 0.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    from hybridflow.saving.store import CheckpointStore, Retention

    kept = CheckpointStore(run_dir / "checkpoints", Retention()).of_loop()
    if step not in kept:
        if step == 0 and not run.sft.steps:
            return
        there = ", ".join(map(str, kept)) or "none"
        raise CheckpointError(
            f"no checkpoint after step {step} in {run_dir / 'checkpoints'} (kept: {there}); replay "
            "a step that follows one of them, or keep more with trainer.save_every_steps=1 and "
            "trainer.max_checkpoints_to_keep=0"
        )
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / kept[step].folder.name).symlink_to(
        kept[step].folder.resolve(), target_is_directory=True
    )
