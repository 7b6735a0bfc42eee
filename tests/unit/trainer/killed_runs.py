"""Runs of the real loop that kill themselves (SIGKILL) at a given moment of a given step, and are
resumed; every attempt is a process.

`python -m tests.unit.trainer.killed_runs FOLDER SCENARIOS.json`: imports once and forks a process
for each attempt. The session, the checkpoint store, the dataset, the sampler and the loop are the
real ones, on the real disk; policy, engines and weight sync are `World`. Every attempt notes in
`ledger.jsonl` which prompts it was about to answer in which step. The moments around a checkpoint
are the renames that make it one, seen by an audit hook before they happen.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.batch import DataProto
from hybridflow.config.schema import (
    DataConfig,
    OptimConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from hybridflow.data.custom import open_prompts
from hybridflow.data.prepare.tasks.arithmetic import CHARACTERS
from hybridflow.data.prepare.tokenizer_files import write_character_tokenizer
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer
from hybridflow.rollout.evaluation import Validator
from hybridflow.saving.manifest import say_saved
from hybridflow.single_controller import block_on
from hybridflow.trainer.loop import RLTrainer
from hybridflow.trainer.protocols import Update
from hybridflow.trainer.samples import Sampled
from hybridflow.trainer.session import Session
from tests.unit.trainer.worlds import Scores, World

# two epochs, and a batch that lies across them
ROWS = 10
PROMPTS = 4
STEPS = 5
IN_A_STEP = ("handed out", "trained")
IN_A_SAVE = (
    "driver state torn",
    "policy begun",
    "policy written",
    "not named yet",
    "not pointed to yet",
)
Kill = tuple[int, str]  # step, moment


@dataclass(frozen=True)
class Files:
    """What every attempt reads."""

    rows: Path
    tokenizer: Tokenizer


class Mortal(World):
    """A world that dies at one moment."""

    def __init__(self, ledger: Path, attempt: int, kill: Kill | None) -> None:
        super().__init__()
        self.ledger = ledger
        self.attempt = attempt
        self.kill = kill
        sys.addaudithook(self._before_a_rename)

    @property
    def step(self) -> int:
        """The step that runs: engines answer with the weights of the one before. A save comes after
        the sync, so it is one behind."""
        return self.engine_version + 1

    def moment(self, step: int, name: str) -> None:
        """Die, if this is when."""
        if self.kill == (step, name):
            os.kill(os.getpid(), signal.SIGKILL)

    def generate(self, prompts: DataProto, *, training: bool) -> DataProto:
        if training:
            note = {
                "attempt": self.attempt,
                "step": self.step,
                "prompts": prompts["index"].tolist()[:: len(prompts) // PROMPTS],
            }
            with self.ledger.open("a") as file:
                file.write(json.dumps(note) + "\n")
            self.moment(self.step, "handed out")
        return super().generate(prompts, training=training)

    async def update(
        self, method: Callable[..., Any], batch: DataProto, seed: int | None = None
    ) -> Sequence[Update]:
        done = await super().update(method, batch, seed)
        self.moment(self.step, "trained")
        return done

    async def save(self, folder: Path, *, phase: str, step: int, background: bool) -> None:
        self.moment(step, "policy begun")
        folder.mkdir()
        (folder / "weights").write_text(str(step))
        (folder / "manifest.json").write_text("{}")
        say_saved(folder)
        self.moment(step, "policy written")

    def load(self, folder: Path, optim: OptimConfig, with_reference: bool = False) -> None:
        super().load(folder, optim, with_reference)
        self.engine_version = int((folder / "weights").read_text())

    def _before_a_rename(self, event: str, args: tuple[Any, ...]) -> None:
        if event != "os.rename":
            return
        target = Path(os.fsdecode(args[1])).name
        named = f"global_step_{self.engine_version}"
        names = {
            "driver.json": "driver state torn",
            named: "not named yet",
            "latest.json": "not pointed to yet",
        }
        if target in names:
            self.moment(self.engine_version, names[target])


def live(
    folder: Path, files: Files, every: int, background: bool, attempt: int, kill: Kill | None
) -> None:
    """One attempt: start or resume as `trainer.app` does, and run until killed or done."""
    config = RunConfig(
        output_dir=str(folder),
        data=DataConfig(train_files=(str(files.rows),), train_batch_size=PROMPTS),
        rollout=RolloutConfig(n=2),
        trainer=TrainerConfig(
            total_steps=STEPS,
            save_every_steps=every,
            async_checkpoints=background,
            loggers=("jsonl",),
        ),
    )
    dataset = open_prompts(config.data.train_files, files.tokenizer, config.data)
    assert len(dataset) == ROWS
    scorer: Any = Scores()
    scorer.tokenizer = files.tokenizer
    session = Session(config)
    session.folder.mkdir(parents=True, exist_ok=True)
    world = Mortal(folder / "ledger.jsonl", attempt, kill)
    validator = Validator(config, {"": dataset}, scorer, session.folder)
    samples = Sampled(config, world, dataset, scorer, session.timeline)
    trainer = RLTrainer(config, session, {"actor": world}, world, samples, validator)
    latest = session.store.latest()
    session.resume(latest)
    if latest is not None:
        block_on(trainer.resume(latest))
    else:
        block_on(trainer.start_from_present_weights())
    block_on(trainer.fit())
    block_on(session.store.wait())
    session.close()


def run_attempts(
    folder: Path, files: Files, every: int, background: bool, kills: Sequence[Kill]
) -> None:
    """An attempt for each kill and one to the end; how each ended goes to `attempts.json`."""
    folder.mkdir(parents=True)
    ends = []
    for attempt, kill in enumerate([*kills, None]):
        child = os.fork()
        if child == 0:
            code = 70
            try:
                live(folder, files, every, background, attempt, kill)
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        ends.append(os.waitstatus_to_exitcode(status))
    (folder / "attempts.json").write_text(json.dumps(ends))


def write_data(folder: Path) -> Files:
    """Ten prompts and a tokenizer, which is opened here: its import takes seconds, a attempt a
    fraction of one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "tokenizer").mkdir(parents=True)
    write_character_tokenizer(folder / "tokenizer", CHARACTERS)
    rows = [
        {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": f"{i}+0"}],
            "reward_model": {"style": "rule", "ground_truth": "1"},
            "extra_info": {"index": i},
        }
        for i in range(ROWS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return Files(folder / "rows.parquet", load_tokenizer(folder / "tokenizer"))


def main(folder: Path, scenarios: Path) -> None:
    """All scenarios of the file: {name: {every, background, kills}}."""
    files = write_data(folder / "data")
    for name, scenario in json.loads(scenarios.read_text()).items():
        kills = [(step, moment) for step, moment in scenario["kills"]]
        run_attempts(folder / name, files, scenario["every"], scenario["background"], kills)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
