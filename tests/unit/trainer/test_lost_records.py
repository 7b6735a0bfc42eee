"""What a run folder loses between two starts, or while a run goes on, is named; a start that is
refused changes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.schema import RunConfig
from hybridflow.errors import CheckpointError, ConfigError, HybridFlowError
from hybridflow.saving.fingerprint import Fingerprint
from hybridflow.saving.manifest import Manifest, read_sealed, write_sealed
from hybridflow.saving.store import Checkpoint
from hybridflow.single_controller import block_on
from hybridflow.trainer.folder import make_room
from hybridflow.trainer.loop import RLTrainer
from hybridflow.trainer.session import Session
from tests.unit.trainer.worlds import World, config_of, trainer_of

DATA = Fingerprint(files={"data.train_files": [["train.parquet", "1"]]}, settings={"seed": 1})
MODEL = {"model_type": "qwen3", "hidden_size": 32}
OTHER = replace(DATA, files={"data.train_files": [["train.parquet", "2"]]})


class Messages:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)


def ended(folder: Path, **trainer: Any) -> RLTrainer:
    """A run of three steps whose last two have checkpoints."""
    made = trainer_of(config_of(folder, save_every_steps=1, **trainer), World())
    made.session.know(DATA, None, MODEL)
    block_on(made.fit())
    block_on(made.session.store.wait())
    made.session.close()
    return made


def again(config: RunConfig) -> tuple[Session, Checkpoint]:
    session = Session(config)
    latest = session.store.latest()
    assert latest is not None
    return session, latest


def cut_at_half(lines: list[str]) -> list[str]:
    return [*lines[: len(lines) // 2], lines[len(lines) // 2][:20] + "\n"]


def without_step_two(lines: list[str]) -> list[str]:
    return [line for line in lines if json.loads(line)["step"] != 2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["metrics.jsonl", "timeline.jsonl"])
@pytest.mark.parametrize(
    ("damage", "lost"), [(cut_at_half, "2-3|3"), (without_step_two, "2"), (lambda lines: [], "1-3")]
)
def test_steps_before_the_checkpoint_that_have_no_record_are_named_at_the_next_start(
    tmp_path: Path, name: str, damage: Callable[[list[str]], list[str]], lost: str
) -> None:
    made = ended(tmp_path)
    session, latest = again(made.config)
    assert session.lost_records(latest) == [] == session.lost_records(None)
    file = made.session.folder / name
    file.write_text("".join(damage(file.read_text().splitlines(keepends=True))))
    [line] = session.lost_records(latest)
    assert line.startswith(
        f"{file} has no record of train step {lost.split('|', maxsplit=1)[0]}"
    ) or line.startswith(f"{file} has no record of train step {lost.rsplit('|', maxsplit=1)[-1]}")
    file.unlink()
    assert (
        "step 1-3, although the run resumes from global_step_3" in session.lost_records(latest)[0]
    )


@pytest.mark.slow
def test_a_run_that_goes_on_from_another_ones_checkpoint_lacks_nothing(tmp_path: Path) -> None:
    """As a replay does; and a run that keeps no metrics.jsonl lacks none."""
    made = ended(tmp_path / "one")
    session = Session(replace(made.config, name="two"))
    session.store.folder.mkdir(parents=True)
    (session.store.folder / "global_step_3").symlink_to(made.session.store.folder / "global_step_3")
    assert session.lost_records(session.store.latest()) == []
    quiet = ended(tmp_path / "quiet", loggers=())
    assert quiet.session.lost_records(quiet.session.store.latest()) == []


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_resume_that_is_refused_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    """Environment, configuration, summary and records are still those of the run that wrote
    them."""
    made = ended(tmp_path)
    folder = made.session.folder
    told = Messages()
    (folder / "summary.json").write_text("{}")
    (folder / "environment.json").write_text('{"python": "of then"}')
    created = "2026-01-01T00:00:00Z"
    manifest = Manifest(
        "rl", 3, ("model",), {"world": 1}, "float32", MODEL, {}, created, backend="megatron"
    )
    manifest.write(folder / "checkpoints" / "global_step_3" / "policy")
    before = contents(folder)
    longer = replace(made.config, trainer=replace(made.config.trainer, total_steps=9))
    make_room(longer, folder, 9, told)  # type: ignore[arg-type]
    session, latest = again(longer)
    latest = replace(latest, fingerprint=DATA)
    with pytest.raises(ConfigError, match="was trained on different rows"):
        session.know(OTHER, latest, MODEL)
    with pytest.raises(CheckpointError, match="hidden_size is 32 in the checkpoint, 64 here"):
        session.know(DATA, latest, MODEL | {"hidden_size": 64})
    with pytest.raises(CheckpointError, match="of family qwen3, but the model is llama"):
        session.know(DATA, latest, {"model_type": "llama"})
    session.close()
    assert contents(folder) == before and told.lines == []
    session.know(DATA, latest, MODEL)
    assert (
        not (folder / "summary.json").exists()
        and "of then" not in (folder / "environment.json").read_text()
    )


@pytest.mark.parametrize("how", ["renamed", "removed"])
def test_a_run_whose_folder_goes_away_stops_and_does_not_make_it_again(
    tmp_path: Path, how: str
) -> None:
    class Elsewhere(World):
        async def update(self, *given: Any, **named: Any) -> Any:
            if self.engine_version == 1:
                folder.rename(tmp_path / "kept") if how == "renamed" else shutil.rmtree(folder)
            return await super().update(*given, **named)

    made = trainer_of(config_of(tmp_path / "out"), Elsewhere())
    folder = made.session.folder
    made.session.know(DATA, None, MODEL)
    with pytest.raises(
        HybridFlowError, match=rf"{folder} no longer exists: it was renamed, moved or emptied"
    ):
        block_on(made.fit())
    with pytest.raises(CheckpointError):
        block_on(made.save())
    made.session.close()
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "KeyError: 'totals'"),
        ({"totals": [1]}, "AttributeError"),
        ({"totals": {"seconds_grpo": "long"}}, "ValueError"),
        ({"totals": {}, "sampler": [3]}, "AttributeError"),
        ({"totals": {}, "sampler": {"position": -1}}, "no valid position"),
    ],
)
def test_a_drivers_part_with_its_hash_and_other_content_is_refused(
    tmp_path: Path, state: dict[str, Any], message: str
) -> None:
    made = ended(tmp_path)
    _, latest = again(made.config)
    file = latest.folder / "driver.json"
    write_sealed(file, {**read_sealed(file), "state": state})
    fresh = trainer_of(made.config, World())
    fresh.session.store.fingerprint = DATA
    latest = fresh.session.store.latest() or latest
    with pytest.raises(CheckpointError, match=message):
        fresh.session.resume(latest)
        block_on(fresh.resume(latest))
