"""Asynchronous runs that lose engines, workers and the driver at random moments: what a checkpoint
holds of answers under way goes on, no prompt is lost, none is trained twice, and every token is
what the engine saw and said."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import (
    AgentConfig,
    DataConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from hybridflow.data.prepare.tokenizer_files import write_character_tokenizer
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer
from hybridflow.engines.base import Completion, WeightSpan
from hybridflow.errors import EnginesLostError
from hybridflow.rollout.conversations import Conversations
from hybridflow.rollout.groups import Groups
from hybridflow.rollout.protocols import Rollouts, SyncReport
from hybridflow.rollout.requests import Requests
from hybridflow.saving.manifest import say_saved
from hybridflow.saving.store import CheckpointStore, Retention
from hybridflow.single_controller import block_on
from hybridflow.workers.requests import CUT_SHORT
from hybridflow.workers.rollout import response_columns
from tests.unscored import Unscored

pytestmark = pytest.mark.slow  # runs that are killed anywhere

SIZE = 2
N = 2
STEPS = 6
MOST = 40
CHARACTERS = "0123456789"
EOS = 1
LOOP = """
import os
from hybridflow.agents.loops.base import agent_loop

@agent_loop("several")
async def several(conversation, tools):
    for _ in range(2):
        await conversation.answer()
        conversation.observe([os.environ["OBSERVED"]])
    await conversation.answer()
"""


class Killed(BaseException):
    """The driver ends here."""


def next_token(prefix: Sequence[int]) -> int:
    """What the policy says after these tokens, whatever its weights."""
    drawn = (sum(prefix) * 31 + len(prefix) * 17) % 11
    return EOS if drawn == 0 else 1 + drawn


class Engines(Requests):
    """Two engines. Each look makes some tokens, with the weights of `version`; then, as `chance`
    says, an engine is lost with what it has told, or the workers with all that they held; after
    `looks` the driver is."""

    def __init__(
        self, config: RunConfig, seed: int, chance: float = 0.0, looks: int = 1 << 30
    ) -> None:
        super().__init__(config)
        self.random = np.random.default_rng(seed)
        self.chance = chance
        self.looks = looks
        self.version = self.made = 0
        self.held: list[dict[int, tuple[list[int], int, list[int], list[str]]]] = [{}, {}]
        self.lost: set[int] = set()

    def _serving(self) -> Sequence[int]:
        # they start again and take the weights
        self.lost = set() if len(self.lost) == 2 else self.lost
        return [number for number in (0, 1) if number not in self.lost]

    async def _ask(self, training: bool, parts: Mapping[int, DataProto]) -> None:
        for engine, part in parts.items():
            rows = zip(
                part["ticket"].tolist(),
                part.jagged("prompt_ids"),
                part["max_new_tokens"],
                strict=True,
            )
            for ticket, prompt, most in rows:
                self.held[engine][ticket] = (prompt.tolist(), int(most), [], [])

    async def _collect(
        self, training: bool, engines: Sequence[int], wait_s: float
    ) -> Sequence[DataProto]:
        self.looks -= 1
        if self.looks < 0:
            raise Killed
        if self.random.random() < self.chance / 3:
            self.held = [{}, {}]
            self._ask_again()
            return []
        return [self._look(engine) for engine in engines]

    def _look(self, engine: int) -> DataProto:
        found: dict[int, Completion] = {}
        is_lost = bool(self.random.random() < self.chance)
        for ticket, (prompt, most, tokens, versions) in list(self.held[engine].items()):
            for _ in range(int(self.random.integers(0, 9))):
                if len(tokens) < most and EOS not in tokens:
                    tokens.append(next_token([*prompt, *tokens]))
                    versions.append(str(self.version))
                    self.made += 1
            reason = "stop" if EOS in tokens else "length" if len(tokens) == most else CUT_SHORT
            if reason != CUT_SHORT or is_lost:
                del self.held[engine][ticket]
                found[ticket] = _answer(tokens, versions, reason)
        self.lost |= {engine} if is_lost else set()
        return _batch(found)

    async def _so_far(self, engines: Sequence[int]) -> Sequence[DataProto]:
        return [
            _batch(
                {
                    t: _answer(tokens, made, CUT_SHORT)
                    for t, (_, _, tokens, made) in self.held[n].items()
                    if tokens
                }
            )
            for n in engines
        ]

    async def _leave_out_lost(self, answers: int) -> None:
        self._serving()

    async def _abort(self, tickets: Mapping[int, Sequence[int]]) -> None:
        raise RuntimeError("nothing is aborted")

    async def sync(self, version: int) -> SyncReport:
        raise RuntimeError("no weights are sent")

    async def sleep(self) -> None:
        raise RuntimeError("no device memory is held")

    async def wake(self, tags: Sequence[str]) -> None:
        raise RuntimeError("no device memory is held")

    async def _forget(self, engines: Sequence[int]) -> None:
        self.held = [{}, {}]


def _answer(tokens: Sequence[int], versions: Sequence[str], reason: str) -> Completion:
    spans = tuple(WeightSpan(version, place, place + 1) for place, version in enumerate(versions))
    return Completion(list(tokens), [-float(token) for token in tokens], reason, spans)


def _batch(answers: Mapping[int, Completion]) -> DataProto:
    tickets = np.array(list(answers), np.int64)
    return response_columns(list(answers.values())).with_columns(ticket=tickets)


class Rows:
    """Prompts of two tokens, one epoch."""

    def __len__(self) -> int:
        return SIZE * STEPS

    def batch(self, rows: np.ndarray) -> DataProto:
        objects = {
            name: np.array(["0"] * len(rows), dtype=object)
            for name in ("data_source", "ground_truth")
        }
        ids = Jagged.from_rows([[3, 3 + int(row)] for row in rows], np.int64)
        return DataProto.from_columns({"prompt_ids": ids, **objects})


class Ranks:
    """A policy without weights."""

    async def save(self, folder: Path, *, phase: str, step: int, background: bool) -> None:
        folder.mkdir()
        (folder / "manifest.json").write_text("{}")
        say_saved(folder)

    async def is_saved(self) -> bool:
        return True


def config_of(
    staleness: int, loop: str = "single_turn", steps: int = STEPS, *, adapts: bool = False
) -> RunConfig:
    ahead = None if adapts else staleness
    return RunConfig(
        data=DataConfig(train_batch_size=SIZE, max_response_length=MOST),
        rollout=RolloutConfig(
            n=N, num_engines=2, max_running_requests=4, agent=AgentConfig(loop=loop)
        ),
        trainer=TrainerConfig(total_steps=steps, max_staleness=staleness, steps_ahead=ahead),
    )


def groups_of(config: RunConfig, service: Rollouts) -> Groups:
    given: Any = (service, Rows(), lambda batch: batch, Unscored())
    return Groups(config, *given)


def check(batch: DataProto, version: int, staleness: int) -> list[int]:
    """The prompts of a step, after checks of every group, token, log-prob and version."""
    prompts = [row.tolist() for row in batch.jagged("prompt_ids")]
    assert (
        prompts == [prompt for prompt in prompts[::N] for _ in range(N)]
        and len(prompts) == SIZE * N
    )
    names = ("response_ids", "response_mask", "rollout_log_probs", "response_versions")
    for prompt, ids, mask, log_probs, versions in zip(
        prompts, *map(batch.jagged, names), strict=True
    ):
        tokens = ids.tolist()
        for place in np.flatnonzero(mask):
            assert tokens[place] == next_token([*prompt, *tokens[:place]])
            assert log_probs[place] == -tokens[place]
        sampled = versions[mask]
        assert len(sampled) and sampled.min() >= version - staleness and sampled.max() <= version
        assert (np.diff(sampled) >= 0).all()
    assert not {CUT_SHORT, "abort"} & set(batch["finish_reason"].tolist())
    return [prompt[1] - 3 for prompt in prompts[::N]]


async def attempts(
    folder: Path, seed: int, loop: str, tokenizer: Tokenizer | None, chance: float
) -> list[list[int]]:
    """A run that is killed some times and resumed; the prompts of each step that counts."""
    random = np.random.default_rng(seed)
    store = CheckpointStore(folder, Retention())
    trained = list[list[int]]()
    deaths = 3
    while len(trained) < STEPS:
        config = config_of(int(random.integers(1, 4)), loop, adapts=random.random() < 0.5)
        looks = int(random.integers(1, 25)) if deaths else 1 << 30
        deaths -= 1
        engines = Engines(config, int(random.integers(1 << 30)), chance, looks)
        service = Conversations(engines, tokenizer, config) if tokenizer else engines
        groups = groups_of(config, service)
        latest = store.latest()
        await groups.restore(
            *((latest.state, latest.rollouts(), latest.step) if latest else (None,))
        )
        del trained[latest.step if latest else 0 :]
        with suppress(Killed):
            while len(trained) < STEPS:
                engines.version = len(trained)
                try:
                    batch = await groups.next_batch(len(trained))
                except EnginesLostError:
                    continue
                trained.append(check(batch, engines.version, config.trainer.max_staleness))
                if random.random() < 0.7 or len(trained) == STEPS:
                    await store.save(
                        "rl", len(trained), groups.state(), Ranks(), rollouts=await groups.begun()
                    )
        is_over = await groups.begun() is None
        await service.forget()  # the tasks of a driver that was killed
    assert is_over and not groups.state()["handed_out"]
    assert engines.is_idle
    return trained


@pytest.mark.parametrize("seed", range(50))
def test_a_run_killed_anywhere_trains_each_prompt_once(seed: int, tmp_path: Path) -> None:
    trained = block_on(attempts(tmp_path, seed, "single_turn", None, chance=0.05))
    assert Counter(itertools.chain.from_iterable(trained)) == Counter(range(SIZE * STEPS))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("characters")
    write_character_tokenizer(folder, CHARACTERS)
    found = load_tokenizer(folder)
    assert found.eos_id == EOS
    return found


@pytest.mark.parametrize("seed", range(20))
def test_conversations_killed_anywhere_go_on_as_long_as_they_are_shown_the_same(
    seed: int, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other run has a tool that answers otherwise in each process: what was said after it is
    asked anew."""
    (tmp_path / "own.py").write_text(LOOP)
    monkeypatch.setenv("OBSERVED", "12")
    if seed % 2:
        made = Conversations.__init__
        processes = itertools.count(13)

        def again(*args: Any) -> None:
            monkeypatch.setenv("OBSERVED", str(next(processes)))
            made(*args)

        monkeypatch.setattr(Conversations, "__init__", again)
    trained = block_on(
        attempts(tmp_path / "saved", seed, f"{tmp_path / 'own.py'}:several", tokenizer, chance=0.03)
    )
    assert Counter(itertools.chain.from_iterable(trained)) == Counter(range(SIZE * STEPS))


@pytest.mark.parametrize("kind", ["single_turn", "several"])
def test_no_token_of_a_checkpoint_is_made_again(
    kind: str, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after each checkpoint, a run makes as many tokens as one that is not."""
    (tmp_path / "own.py").write_text(LOOP)
    monkeypatch.setenv("OBSERVED", "12")
    config = config_of(2, kind if kind == "single_turn" else f"{tmp_path / 'own.py'}:several")

    async def run(killed: bool) -> tuple[int, list[int]]:
        state: Any = None
        begun: DataProto | None = None
        made = 0
        trained = list[int]()
        for version in range(STEPS):
            if killed or not version:
                engines = Engines(config, version)
                service = (
                    engines if kind == "single_turn" else Conversations(engines, tokenizer, config)
                )
                groups = groups_of(config, service)
                await groups.restore(state, begun, version)
            engines.version = version
            trained += check(await groups.next_batch(version), version, 2)
            state = json.loads(json.dumps(groups.state()))
            begun = await groups.begun()
            made += engines.made if killed or version == STEPS - 1 else 0
            if killed:
                await service.forget()
        return made, sorted(trained)

    assert block_on(run(killed=True)) == block_on(run(killed=False))


def test_answers_that_another_run_could_not_use_are_asked_anew() -> None:
    """Too old for a smaller staleness, of another number of samples, or of another agent loop."""
    engines = Engines(config_of(3), 0)
    groups = groups_of(config_of(3), engines)
    check(block_on(groups.next_batch(0)), 0, 3)
    state = groups.state()
    begun = block_on(groups.begun())
    assert begun is not None
    for config, kept in ((config_of(3), True), (config_of(1), False), (config_of(0), False)):
        engines = Engines(config, 1)
        resumed = groups_of(config, engines)
        block_on(resumed.restore(state, begun, 1))
        resumed._hand_out(1)
        assert kept == bool(block_on(resumed.begun()))
        engines.version = 1
        check(block_on(resumed.next_batch(1)), 1, config.trainer.max_staleness)
    for other in ({"n": 3}, {"loop": "tools"}, {"routes": True}):
        resumed = groups_of(config_of(3), engines)
        block_on(resumed.restore({**state, **other}, begun, 1))
        assert resumed._begun is None
