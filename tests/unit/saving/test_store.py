"""The driver's side of checkpoints: what counts, what is told to the training, and what is deleted
when."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow.batch import DataProto
from hybridflow.cli.main import main
from hybridflow.errors import CheckpointError
from hybridflow.saving import store as checkpoints
from hybridflow.saving.manifest import MANIFEST, Manifest, read_sealed, say_saved, write_sealed
from hybridflow.saving.store import Checkpoint, CheckpointStore, Retention
from hybridflow.single_controller import block_on


class Ranks:
    """The policy's ranks: a background save ends when `finish` is called, or fails with
    `failure`."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.failure = ""
        self.saves: list[tuple[str, int, bool]] = []

    async def save(self, folder: Path, *, phase: str, step: int, background: bool) -> None:
        self.saves.append((phase, step, background))
        folder.mkdir()
        (folder / "rank_0.bin").write_text("weights")
        self.folder = folder
        if not background:
            self.finish()

    def finish(self) -> None:
        assert self.folder is not None
        (self.folder / "manifest.json").write_text("{}")
        say_saved(self.folder)

    async def is_saved(self) -> bool:
        if self.failure:
            raise CheckpointError(self.failure)
        return False


def store_in(
    folder: Path, last: int = 0, every: int = 0, timeout_s: float = 120.0
) -> CheckpointStore:
    return CheckpointStore(folder, Retention(last, every), background=True, timeout_s=timeout_s)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_counts_only_when_its_manifest_is_there(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    ranks = Ranks()
    block_on(store.save("rl", 1, {"sampler": 7}, ranks))
    block_on(store.check())
    time.sleep(0.2)
    assert store.latest() is None and names(tmp_path) == ["global_step_1.partial"]
    ranks.finish()
    deadline = time.monotonic() + 60
    while not (tmp_path / "latest.json").exists():  # without the training's help: its step may last
        assert time.monotonic() < deadline
        time.sleep(0.01)
    latest = store.latest()
    assert latest is not None and (latest.step, latest.phase, latest.state) == (
        1,
        "rl",
        {"sampler": 7},
    )
    assert names(tmp_path) == ["global_step_1", "latest.json"]


def test_a_save_whose_manifest_is_there_does_not_count_before_the_ranks_have_said_so(
    tmp_path: Path,
) -> None:
    """Rank 0 syncs after the rename that shows its manifest, and may fail in that."""
    store = store_in(tmp_path)
    ranks = Ranks()
    block_on(store.save("rl", 1, {}, ranks))
    assert ranks.folder is not None
    write_sealed(ranks.folder / MANIFEST, {})
    time.sleep(0.3)
    assert store.latest() is None and names(tmp_path) == ["global_step_1.partial"]
    say_saved(ranks.folder)
    block_on(store.wait())
    latest = store.latest()
    assert latest is not None and names(latest.folder) == ["driver.json", "policy"]


class SlowRanks:
    """Ranks that write in a thread as the real ones do: files with a sync, the manifest, and last
    that all is there."""

    def __init__(self) -> None:
        self.thread = threading.Thread()
        self.errors: list[BaseException] = []

    async def save(self, folder: Path, *, phase: str, step: int, background: bool) -> None:
        self.thread = threading.Thread(target=self._write, args=(folder, step))
        self.thread.start()

    def _write(self, folder: Path, step: int) -> None:
        try:
            folder.mkdir()
            for rank in range(2):
                write_sealed(folder / f"rank_{rank}.json", {"step": step})
            write_sealed(folder / MANIFEST, {"step": step})
            say_saved(folder)
        except OSError as error:
            self.errors.append(error)

    async def is_saved(self) -> bool:
        return not self.thread.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runs", "saves", "longest_s"),
    [
        pytest.param(8, 3, 0.2, id="some"),
        pytest.param(64, 8, 2.0, id="whole", marks=pytest.mark.full),
    ],
)
def test_renames_syncs_and_listings_that_take_long_lose_no_save_and_end_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: int, saves: int, longest_s: float
) -> None:
    """As on NFS and Lustre. Runs go on at the same time, each is stopped now and then in the middle
    of a save, and goes on from what is in force: all of the last save that ended, or of a later
    one."""
    for name in ("replace", "fsync", "scandir"):
        monkeypatch.setattr(os, name, _delayed(getattr(os, name), random.Random(name), longest_s))

    def run(number: int) -> int:
        drawn = random.Random(number)
        folder = tmp_path / str(number)
        ended = 0
        resumes = 0
        store = store_in(folder, last=2)
        ranks = SlowRanks()
        for step in range(1, saves + 1):
            block_on(store.save("rl", step, {}, ranks))
            if drawn.random() < 0.7:
                block_on(store.wait())
                ended = step
            else:
                time.sleep(drawn.random() * longest_s * 3)
                store.settle()
                ranks.thread.join()
                store = store_in(folder, last=2)
                resumes = resumes + 1
            latest = store.latest()
            assert ended == 0 or latest is not None
            if latest is not None:
                assert ended <= latest.step <= step
                files = sorted(latest.policy.iterdir())
                assert [file.name for file in files] == [MANIFEST, "rank_0.json", "rank_1.json"]
                assert {read_sealed(file)["step"] for file in files} == {latest.step}
        assert ranks.errors == []
        return resumes

    with ThreadPoolExecutor(runs) as pool:
        assert sum(pool.map(run, range(runs))) > runs // 2


def _delayed(
    action: Callable[..., Any], drawn: random.Random, longest_s: float
) -> Callable[..., Any]:
    """The action, with a delay before and after it: most are short, so that a process that is held
    up meets others that are not."""

    def delayed(*given: Any) -> Any:
        time.sleep(drawn.random() ** 3 * longest_s / 2)
        result = action(*given)
        time.sleep(drawn.random() ** 3 * longest_s / 2)
        return result

    return delayed


def test_the_next_save_waits_for_the_one_under_way(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    ranks = Ranks()
    block_on(store.save("rl", 1, {}, ranks))
    finished: list[int] = []

    def finish() -> None:
        finished.append(len(ranks.saves))
        ranks.finish()

    threading.Timer(0.4, finish).start()
    block_on(store.save("rl", 2, {}, ranks))
    assert finished == [1]
    assert ranks.saves == [("rl", 1, True), ("rl", 2, True)]
    assert names(tmp_path) == ["global_step_1", "global_step_2.partial", "latest.json"]
    store.settle()


def test_waiting_has_a_deadline(tmp_path: Path) -> None:
    store = store_in(tmp_path, timeout_s=0.3)
    ranks = Ranks()
    block_on(store.save("rl", 1, {}, ranks))
    with pytest.raises(
        CheckpointError,
        match=r"global_step_1 was not written within 0 s \(trainer.checkpoint_timeout_s\)",
    ):
        block_on(store.wait())
    store.settle()


def test_a_failure_in_the_background_reaches_the_next_step_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    store = store_in(tmp_path)
    ranks = Ranks()
    block_on(store.save("rl", 1, {}, ranks))
    ranks.finish()
    block_on(store.wait())
    block_on(store.save("rl", 2, {}, ranks))
    ranks.failure = "rank 3: No space left on device"
    with pytest.raises(CheckpointError, match="rank 3: No space left on device"):
        block_on(store.check())
    assert names(tmp_path) == ["global_step_1", "latest.json"]
    block_on(store.check())  # told once


def test_a_manifest_that_comes_after_the_end_does_not_count(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    ranks = Ranks()
    block_on(store.save("rl", 1, {}, ranks))
    store.settle()
    ranks.finish()
    time.sleep(0.2)
    assert store.latest() is None
    assert names(tmp_path) == ["global_step_1.partial"]
    again = store_in(tmp_path)
    block_on(again.save("rl", 1, {}, ranks))  # what is left of it does not stand in the way
    ranks.finish()
    block_on(again.wait())
    assert names(tmp_path) == ["global_step_1", "latest.json"]


def test_a_save_that_is_whole_when_the_ranks_go_counts(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    ranks = Ranks()
    for step in (1, 2):
        block_on(store.save("rl", step, {}, ranks))
        if step == 1:
            store.settle()  # cut short: its remains go with the next commit
    ranks.finish()
    store.settle()
    latest = store.latest()
    assert latest is not None and latest.step == 2
    assert names(tmp_path) == ["global_step_2", "latest.json"]


def test_both_roles_must_be_whole(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    policy = Ranks()
    critic = Ranks()
    block_on(store.save("rl", 1, {}, policy, critic=critic))
    policy.finish()
    time.sleep(0.2)
    store.settle()
    assert store.latest() is None
    block_on(store.save("rl", 2, {}, policy, critic=critic))
    policy.finish()
    critic.finish()
    store.settle()
    latest = store.latest()
    assert latest is not None and latest.step == 2 and latest.critic.is_dir()


@pytest.mark.parametrize(
    ("last", "every", "kept"),
    [
        (0, 0, [1, 2, 3, 4, 5, 6, 7]),
        (1, 0, [7]),
        (2, 0, [6, 7]),
        (2, 3, [3, 6, 7]),
        (1, 2, [2, 4, 6, 7]),
    ],
)
def test_the_newest_and_every_so_manieth_stay(
    tmp_path: Path, last: int, every: int, kept: list[int]
) -> None:
    store = store_in(tmp_path, last, every)
    ranks = Ranks()
    for step in range(1, 8):
        block_on(store.save("rl", step, {}, ranks))
        ranks.finish()
        block_on(store.wait())
        newest = store.latest()
        assert newest is not None and newest.step == step and newest.policy.is_dir()
    assert names(tmp_path) == [*[f"global_step_{step}" for step in kept], "latest.json"]


def test_saving_the_step_in_force_once_more_does_not_endanger_it(tmp_path: Path) -> None:
    store = store_in(tmp_path, last=1)
    ranks = Ranks()
    for state in ({"number": 1}, {"number": 2}):
        block_on(store.save("rl", 5, state, ranks))
        ranks.finish()
        block_on(store.wait())
    latest = store.latest()
    assert (
        latest is not None
        and latest.state == {"number": 2}
        and latest.folder.name != "global_step_5"
    )
    assert json.loads((tmp_path / "latest.json").read_text())["folder"] == latest.folder.name
    assert len(names(tmp_path)) == 2


def test_who_asks_while_a_newer_one_replaces_the_last_is_told_of_the_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader has read latest.json; before it opens the folder, the run has saved again and
    dropped that folder."""
    store = store_in(tmp_path, last=1)
    ranks = Ranks()

    def save(step: int) -> None:
        block_on(store.save("rl", step, {}, ranks))
        ranks.finish()
        block_on(store.wait())

    save(1)
    read = checkpoints.read_checkpoint
    behind = [2, 3]

    def late(folder: Path) -> Checkpoint:
        if behind:
            with monkeypatch.context() as inside:  # saving reads as well
                inside.setattr(checkpoints, "read_checkpoint", read)
                save(behind.pop(0))
        return read(folder)

    monkeypatch.setattr(checkpoints, "read_checkpoint", late)
    latest = store_in(tmp_path).latest()
    assert latest is not None and latest.step == 3 and behind == []
    (tmp_path / "global_step_3" / "driver.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"latest\.json does not point to a complete checkpoint"
    ):
        store.latest()


def test_a_pointer_leads_to_no_other_folder(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    other = store_in(tmp_path / "elsewhere")
    ranks = Ranks()
    block_on(other.save("rl", 1, {}, ranks))
    ranks.finish()
    block_on(other.wait())
    for name in (
        "../elsewhere/global_step_1",
        str(tmp_path / "elsewhere" / "global_step_1"),
        "..",
        "",
    ):
        (folder / "latest.json").write_text(json.dumps({"folder": name}))
        with pytest.raises(CheckpointError, match="is not the name of a file inside the folder"):
            store_in(folder).latest()


def test_without_a_pointer_the_newest_whole_checkpoint_is_in_force(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    ranks = Ranks()
    for step in (1, 2):
        block_on(store.save("rl", step, {"number": step}, ranks))
        ranks.finish()
        block_on(store.wait())
    (tmp_path / "latest.json").unlink()
    (tmp_path / "global_step_3").mkdir()  # without a manifest it does not count
    shutil.copy(tmp_path / "global_step_2" / "driver.json", tmp_path / "global_step_3")
    latest = store_in(tmp_path).latest()
    assert latest is not None and latest.step == 2 and latest.state == {"number": 2}


@pytest.mark.parametrize(
    "change", [lambda text: text.replace("7", "8"), lambda text: text[:-20], lambda text: "{}"]
)
def test_the_drivers_part_of_a_checkpoint_is_checked(
    tmp_path: Path, change: Callable[[str], str]
) -> None:
    store = store_in(tmp_path)
    ranks = Ranks()
    block_on(store.save("rl", 1, {"sampler": 7}, ranks))
    ranks.finish()
    block_on(store.wait())
    file = tmp_path / "global_step_1" / "driver.json"
    file.write_text(change(file.read_text()))
    with pytest.raises(CheckpointError, match=r"driver\.json"):
        store_in(tmp_path).latest()


def test_a_pointer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latest.json").mkdir()
    with pytest.raises(
        CheckpointError, match=r"latest\.json does not point to a complete checkpoint"
    ):
        store_in(tmp_path).latest()


def policy_with_manifest(folder: Path, step: int) -> None:
    folder.mkdir(parents=True)
    layout = {"world": 1}
    model = {"model_type": "qwen3"}
    Manifest("rl", step, ("model",), layout, "float32", model, {}, "2026-01-01T00:00:00Z").write(
        folder
    )


class Whole(Ranks):
    """Ranks whose manifests are whole."""

    async def save(self, folder: Path, *, phase: str, step: int, background: bool) -> None:
        policy_with_manifest(folder, step)


def whole_checkpoint(folder: Path, **others: Any) -> Path:
    return block_on(
        CheckpointStore(folder, Retention()).save("rl", 3, {"totals": {}}, Whole(), **others)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda at: (at / "driver.json").unlink(),
            r"driver\.json is missing: this checkpoint can only be exported",
        ),
        (lambda at: shutil.rmtree(at / "critic"), r"critic is not a complete checkpoint"),
        (
            lambda at: (at / "rollouts.parquet").unlink(),
            r"rollouts\.parquet cannot be read: No such file",
        ),
        (
            lambda at: (at / "rollouts.parquet").write_bytes(b"PAR1"),
            r"rollouts\.parquet has 4 bytes",
        ),
        (
            lambda at: write_sealed(
                at / "driver.json", {**read_sealed(at / "driver.json"), "step": 4}
            ),
            r"driver\.json is from step 4 \(rl\), but .*policy/manifest\.json is from step 3 \(rl\)",
        ),
        (
            lambda at: write_sealed(
                at / "driver.json", {**read_sealed(at / "driver.json"), "roles": ["../x"]}
            ),
            r"driver\.json does not list the checkpoint's parts",
        ),
        (
            lambda at: write_sealed(
                at / "driver.json", {**read_sealed(at / "driver.json"), "phase": "other"}
            ),
            r"driver\.json has the right hash but does not contain a valid phase",
        ),
    ],
)
@pytest.mark.parametrize("name", ["global_step_3", "the one that I keep"])
def test_each_part_of_a_checkpoint_that_is_missing_is_named_by_verify_and_before_a_resume(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    said: str,
    name: str,
) -> None:
    rollouts = DataProto.from_columns({"x": np.arange(3)})
    at = whole_checkpoint(tmp_path / "checkpoints", critic=Whole(), rollouts=rollouts).rename(
        tmp_path / name
    )
    known = Checkpoint(at, "rl", 3, {})
    known.check_parts()
    assert main(["checkpoint", "verify", str(at)]) == 0
    damage(at)
    with pytest.raises(CheckpointError, match=said):
        known.check_parts()
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(at)]) == 1
    assert re.search(said, capsys.readouterr().err)


def test_a_checkpoint_that_is_left_out_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without latest.json an older one is in force: silence would train its steps again."""
    folder = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        block_on(CheckpointStore(folder, Retention()).save("rl", step, {}, Whole()))
    store = CheckpointStore(folder, Retention())
    assert store.left_out() == []
    (folder / "latest.json").unlink()
    (folder / "global_step_3" / "driver.json").unlink()
    (folder / "global_step_2" / "policy" / "manifest.json").unlink()
    (folder / "global_step_4.partial").mkdir()
    latest = store.latest()
    assert latest is not None and latest.step == 1
    two, three = store.left_out()
    assert (
        "global_step_2 is ignored and cannot be used to resume: policy/manifest.json is missing"
        in two
    )
    assert "global_step_3 is ignored and cannot be used to resume: driver.json is missing" in three
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("is ignored") == 2
