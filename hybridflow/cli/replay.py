"""`hybridflow replay`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.cli.command import add_command, new_folder, run_job, say
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
    from hybridflow.config.recorded import RECORDED, load_values, read_recorded, refuse_code
    from hybridflow.observe.rollouts import dump_path, list_dumps

    values = read_recorded(run_dir / RECORDED)
    dump = dump_path(run_dir / "rollouts", args.step)
    if not dump.is_file():
        there = ", ".join(str(step) for step, _ in list_dumps(run_dir / "rollouts")) or "none"
        raise ConfigError(f"{dump}: no such dump (steps with a dump: {there})")
    folder = new_folder(run_dir / "replay", f"step_{args.step:06d}")
    own = {
        "name": folder.name,
        "output_dir": str(folder.parent),
        "trainer.rollouts_from": str(dump),
        "trainer.dump_rollouts_every_steps": 1,
        "trainer.export": "false",
        "trainer.report": "false",
    }
    try:
        words = [*args.overrides, *(f"{key}={value}" for key, value in own.items())]
        run = load_values(values, words)
        if not args.run_code:
            refuse_code(run, run_dir / RECORDED, args.overrides, "the replay")
        check(run, "train")
        _link_checkpoint(run, run_dir, folder, args.step - 1)
    except BaseException:
        folder.rmdir()
        raise
    return _replay(run, run_dir, folder, args.step)


def _replay(run: RunConfig, run_dir: Path, folder: Path, step: int) -> int:
    from hybridflow.observe.compare import compare_step, describe

    run_job("train", run)
    differences = compare_step(run_dir, folder, step)
    say(f"\nstep {step} of {run_dir} -> {folder}\n{describe(differences)}")
    return int(any(one.differing for one in differences))


def _link_checkpoint(run: RunConfig, run_dir: Path, folder: Path, step: int) -> None:
    """Link the run's checkpoint after `step` so that the replay starts from it, or from scratch if
    `step` is 0.

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
