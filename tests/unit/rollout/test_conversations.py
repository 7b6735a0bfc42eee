"""Conversations over a rollout service: rounds, columns, and what a loop or tool that misbehaves
does to the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow.agents.loops.base import LOOPS
from hybridflow.batch import (
    FREE,
    ROUTED,
    ROUTES,
    SUPPORT,
    DataProto,
    Jagged,
    Supports,
    support_columns,
)
from hybridflow.config.check import problems
from hybridflow.config.schema import (
    ActorConfig,
    AgentConfig,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
)
from hybridflow.data.prepare.tokenizer_files import write_character_tokenizer
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer
from hybridflow.engines.base import Completion, WeightSpan
from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.rollout.conversations import Conversations, conversing
from hybridflow.rollout.protocols import Rollouts, SyncReport
from hybridflow.rollout.requests import Requests
from hybridflow.single_controller import block_on
from hybridflow.workers.rollout import response_columns

CHARACTERS = "0123456789+-*=</>acdefilortuw "
OWN = '''
import asyncio, sys
from hybridflow.agents.loops.base import agent_loop

@agent_loop("fails_for_two")
async def fails_for_two(conversation, tools):
    await conversation.answer()
    if conversation.row["ground_truth"] == "2":
        raise RuntimeError("no such state")

@agent_loop("waits_for_ever_for_two")
async def waits_for_ever_for_two(conversation, tools):
    await conversation.answer()
    if conversation.row["ground_truth"] == "2":
        await asyncio.Event().wait()

working = []

@agent_loop("joins_later")
async def joins_later(conversation, tools):
    """One conversation works on something until the engine has answered others."""
    if conversation.row["ground_truth"] == "2":
        working.append(asyncio.get_running_loop().create_future())
        await working[0]
    await conversation.answer()
'''


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("characters")
    write_character_tokenizer(folder, CHARACTERS)
    return load_tokenizer(folder)


class Engines(Requests):
    """An engine that answers a prompt's text with `say(text)` and an eos in each round; keeps what
    it was asked."""

    def __init__(
        self, tokenizer: Tokenizer, say: Callable[[str], str], config: RunConfig | None = None
    ) -> None:
        super().__init__(config or RunConfig())
        self.tokenizer = tokenizer
        self.say = say
        self.rounds = list[list[str]]()
        self.rooms = list[list[int]]()
        self.slept: list[Any] = []
        self.aborted: list[int] = []
        # by ticket
        self.given = dict[int, list[int]]()
        self.waiting = dict[int, str]()

    def _serving(self) -> Sequence[int]:
        return [0]

    async def _ask(self, training: bool, parts: Mapping[int, DataProto]) -> None:
        tickets = parts[0]["ticket"].tolist()
        rows = [row.tolist() for row in parts[0].jagged("prompt_ids")]
        texts = ["".join(self.tokenizer.decode([token]) or "." for token in row) for row in rows]
        self.given |= dict(zip(tickets, rows, strict=True))
        self.waiting |= dict(zip(tickets, texts, strict=True))
        self.rounds.append(texts)
        self.rooms.append(parts[0]["max_new_tokens"].tolist())

    async def _collect(
        self, training: bool, engines: Sequence[int], wait_s: float
    ) -> Sequence[DataProto]:
        answers = {ticket: self._answer(text) for ticket, text in self.waiting.items()}
        self.waiting.clear()
        tickets = np.array(list(answers), np.int64)
        return [self.columns(answers).with_columns(ticket=tickets)]

    def columns(self, answers: Mapping[int, Completion]) -> DataProto:
        """The columns of these answers, by ticket."""
        return response_columns(list(answers.values()))

    def _answer(self, text: str) -> Completion:
        ids = [*self.tokenizer.encode(self.say(text)), self.tokenizer.eos_id]
        return Completion(ids, [-0.5] * len(ids), "stop", (WeightSpan("3", 0, len(ids)),))

    async def _abort(self, tickets: Mapping[int, Sequence[int]]) -> None:
        self.aborted += tickets[0]
        for ticket in tickets[0]:
            del self.waiting[ticket]

    async def _forget(self, engines: Sequence[int]) -> None:
        self.waiting.clear()

    async def sync(self, version: int) -> SyncReport:
        raise RuntimeError("no weights are sent")

    async def sleep(self) -> None:
        self.slept.append("sleep")

    async def wake(self, tags: Sequence[str]) -> None:
        self.slept.append(tags)

    async def _so_far(self, engines: Sequence[int]) -> Sequence[DataProto]:
        raise RuntimeError("nothing is saved")

    async def _leave_out_lost(self, answers: int) -> None:
        raise RuntimeError("no engine is lost")


def answers(service: Rollouts, prompts: DataProto, *, training: bool = True) -> DataProto:
    async def held() -> DataProto:
        return await service.answers(service.begin(prompts, training=training))

    return block_on(held())


def config(limit: int = 60, **agent: Any) -> RunConfig:
    return RunConfig(
        data=DataConfig(max_response_length=limit),
        rollout=RolloutConfig(agent=AgentConfig(**agent)),
    )


def prompts(tokenizer: Tokenizer, *texts: str) -> DataProto:
    rows = [np.array(tokenizer.encode_chat([{"role": "user", "content": text}])) for text in texts]
    objects = {
        "data_source": ["x"] * len(texts),
        "ground_truth": [str(number + 1) for number in range(len(texts))],
        "extra_info": [{}] * len(texts),
    }
    columns = {name: np.array(values, dtype=object) for name, values in objects.items()}
    return DataProto.from_columns({"prompt_ids": Jagged.from_rows(rows, np.int64), **columns})


def asks_the_calculator(text: str) -> str:
    """Calls it for a product, copies what it returned, and answers anything else with 7."""
    question, _, rest = text.rstrip("=").partition("=")
    if rest:
        return rest.rpartition(">")[2].strip(".")
    return f"<calculator>{question}</calculator>" if "*" in question else "7"


def test_conversations_of_several_lengths_in_rounds(tokenizer: Tokenizer) -> None:
    engines = Engines(tokenizer, asks_the_calculator)
    service = Conversations(
        engines, tokenizer, config(loop="tools", tools=("calculator",), call_format="tags")
    )
    found = answers(service, prompts(tokenizer, "3*4", "3+4", "5*5"), training=True)
    assert [len(texts) for texts in engines.rounds] == [3, 2]
    assert engines.rounds[1] == [
        "3*4=<calculator>3*4</calculator>.12=",
        "5*5=<calculator>5*5</calculator>.25=",
    ]
    assert engines.rooms == [[60, 60, 60], [60 - 32, 60 - 32]]
    assert found["answer_text"].tolist() == ["12", "7", "25"]
    assert found["turns"].tolist() == [2, 1, 2] and found["tool_calls"].tolist() == [1, 0, 1]
    masks = found.jagged("response_mask")
    called = [1] * 29 + [0] * 3 + [1] * 3
    assert [row.astype(int).tolist() for row in masks] == [called, [1, 1], called]
    for name in ("response_ids", "rollout_log_probs", "response_versions"):
        assert found.lengths(name).tolist() == masks.lengths.tolist()
    assert set(found.jagged("response_versions").values.tolist()) == {3}
    assert (
        found["weight_version"].tolist() == ["3"] * 3
        and found["finish_reason"].tolist() == ["stop"] * 3
    )
    assert found["messages"][0] == [
        {"role": "assistant", "content": "<calculator>3*4</calculator>"},
        {"role": "tool", "content": "12"},
        {"role": "assistant", "content": "12"},
    ]
    assert found["agent_failure"].tolist() == [None] * 3


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "loops.py"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize(
    ("loop", "failure"),
    [
        ("fails_for_two", "RuntimeError: no such state (line 9)"),
        pytest.param("waits_for_ever_for_two", "no progress for 2 s", marks=pytest.mark.slow),
    ],
)
def test_a_loop_that_fails_costs_its_own_conversation(
    tokenizer: Tokenizer, own: Path, loop: str, failure: str
) -> None:
    service = Conversations(
        Engines(tokenizer, lambda _: "7"), tokenizer, config(loop=f"{own}:{loop}", timeout_s=2.0)
    )
    found = answers(service, prompts(tokenizer, "1", "2", "3"), training=True)
    assert found["agent_failure"].tolist() == [None, failure, None]
    assert [row.tolist() for row in found.jagged("response_mask")] == [
        [True] * 2,
        [False] * 2,
        [True] * 2,
    ]
    with pytest.raises(
        HybridFlowError,
        match=r"failed in all 2 conversations; first error: (RuntimeError|no progress)",
    ):
        answers(service, prompts(tokenizer, "1", "2", "2").rows([1, 1]), training=True)


def test_a_conversation_that_works_beside_the_engine_joins_a_later_round(
    tokenizer: Tokenizer, own: Path
) -> None:
    def say(text: str) -> str:
        if text == "3=":
            working[0].set_result(None)
        return "7"

    working = LOOPS.get(f"{own}:joins_later").function.__globals__["working"]  # type: ignore[attr-defined]
    engines = Engines(tokenizer, say)
    service = Conversations(engines, tokenizer, config(loop=f"{own}:joins_later"))
    found = answers(service, prompts(tokenizer, "1", "2", "3"), training=False)
    assert engines.rounds == [["1=", "3="], ["2="]] and found["turns"].tolist() == [1, 1, 1]


def test_an_environment_answers_and_rewards(tokenizer: Tokenizer) -> None:
    """A policy that halves what is left finds every number; the third row is a game that does not
    begin."""

    def halves(text: str) -> str:
        low = 0
        high = 7
        guess = -1
        for character in text.partition("=")[2]:
            if character.isdigit():
                guess = int(character)
            elif character == "+":
                low = guess + 1
            elif character == "-":
                high = guess - 1
        return str((low + high) // 2)

    engines = Engines(tokenizer, halves)
    service = Conversations(
        engines, tokenizer, config(loop="environment", environment="guess", max_answers=2)
    )
    batch = prompts(tokenizer, "0*7", "0*7", "0*7", "0*7")
    truths = np.array(["3", "5", "none", "7"], dtype=object)
    found = answers(service, batch.with_columns(ground_truth=truths), training=True)
    assert found["turn_rewards"].tolist() == [[1.0], [0.0, 1.0], [], [0.0, 0.0]]
    assert found["turns"].tolist() == [1, 2, 0, 2]
    assert [row.astype(int).tolist() for row in found.jagged("response_mask")] == [
        [1, 1],
        [1, 1, 0, 0, 1, 1],
        [],
        [1, 1, 0, 0, 1, 1, 0, 0],
    ]
    assert [
        failure and failure.partition(": V")[0] for failure in found["agent_failure"].tolist()
    ] == [
        None,
        None,
        "the environment failed",
        None,
    ]


def test_an_error_of_the_engines_ends_the_step_and_not_the_next_one(tokenizer: Tokenizer) -> None:
    engines = Engines(tokenizer, lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    service = Conversations(engines, tokenizer, config(loop="tools", tools=("calculator",)))
    with pytest.raises(ZeroDivisionError):
        answers(service, prompts(tokenizer, "1", "2"), training=True)
    engines.say = lambda _: "7"
    block_on(service.forget())
    assert engines.is_idle and not engines.waiting and not service._going_on
    assert answers(service, prompts(tokenizer, "1"), training=True)["answer_text"].tolist() == ["7"]
    block_on(service.sleep())
    block_on(service.wake(["weights"]))
    assert engines.slept == ["sleep", ["weights"]]


def test_a_conversation_is_aborted_with_what_it_asks_and_the_others_go_on(
    tokenizer: Tokenizer,
) -> None:
    engines = Engines(tokenizer, asks_the_calculator)
    service = Conversations(
        engines, tokenizer, config(loop="tools", tools=("calculator",), call_format="tags")
    )

    async def two_of_three() -> None:
        samples = service.begin(prompts(tokenizer, "2*3=", "4*5=", "6*7="), training=True)
        await service.advance()  # all have called the calculator
        await engines._send()
        assert len(engines.waiting) == 3
        await service.abort(samples[:2])
        assert engines.aborted == [3, 4] and samples[1].done() and list(engines.waiting) == [5]
        found = await service.answers(samples[2:])
        assert found["finish_reason"].tolist() == ["stop"] and found["turns"].tolist() == [2]
        assert found["agent_failure"].tolist() == [None] and not service._going_on

    block_on(two_of_three())


def test_conversations_that_are_given_up_before_they_begin_are_gone(tokenizer: Tokenizer) -> None:
    service = Conversations(Engines(tokenizer, lambda _: "1"), tokenizer, config(loop="tools"))

    async def at_once() -> None:
        samples = service.begin(prompts(tokenizer, "2*3=", "4*5="), training=True)
        await service.forget()
        assert all(one.done() for one in samples) and not service._going_on

    block_on(at_once())


def test_supports_of_all_answers_are_kept_and_what_was_shown_has_none(tokenizer: Tokenizer) -> None:
    class Cutting(Engines):
        def columns(self, answers: Mapping[int, Completion]) -> DataProto:
            found = super().columns(answers)
            rows = [  # each token was sampled among itself and its ticket
                Supports(
                    np.full(len(ids), 2, np.int32),
                    np.stack([ids, np.full(len(ids), ticket)], 1).reshape(-1),
                )
                for ticket, ids in zip(answers, found.jagged("response_ids"), strict=True)
            ]
            return found.with_columns(**support_columns(rows))

    settings = config(loop="tools", tools=("calculator",), call_format="tags")
    settings = replace(
        settings, rollout=replace(settings.rollout, sampling=SamplingConfig(top_k=9))
    )
    service = Conversations(Cutting(tokenizer, asks_the_calculator), tokenizer, settings)
    found = answers(service, prompts(tokenizer, "2*3=", "4*5="), training=True)
    names = (*SUPPORT, "response_ids", "response_mask")
    for number, (sizes, ids, tokens, mask) in enumerate(
        zip(*map(found.jagged, names), strict=True)
    ):
        assert sizes.tolist() == (2 * mask).tolist() and not mask.all()
        assert ids.reshape(-1, 2)[:, 0].tolist() == tokens[mask].tolist()
        assert ids.reshape(-1, 2)[:, 1].tolist() == sorted(ids.reshape(-1, 2)[:, 1].tolist())
        assert set(ids.reshape(-1, 2)[:, 1].tolist()) == {number, 2 + number}


def test_each_token_keeps_the_experts_of_the_request_that_made_it(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """What a tool says has those of the answer after it; the last token, and all of a failed
    conversation, have none."""

    class Routing(Engines):
        def columns(self, answers: Mapping[int, Completion]) -> DataProto:
            rows = []
            # every known expert is the ticket of the request
            for ticket, answer in answers.items():
                row = np.full((len(self.given[ticket]) + len(answer.token_ids), 3, 2), ticket)
                row[-1] = FREE
                rows.append(row)
            return (
                super().columns(answers).with_columns(**{ROUTES: Jagged.from_rows(rows, np.int16)})
            )

    (tmp_path / "own.py").write_text(OWN)
    sizes = {"model_type": "qwen3_moe", "num_hidden_layers": 3, "num_experts_per_tok": 2}
    for loop, agent in (
        ("tools", {"tools": ("calculator",), "call_format": "tags"}),
        ("fails_for_two", {}),
    ):
        path = loop if loop == "tools" else f"{tmp_path / 'own.py'}:{loop}"
        settings = replace(
            config(loop=path, **agent),
            actor=ActorConfig(router_replay="r3"),
            model=ModelConfig(hf_config=sizes),
        )
        service = Conversations(Routing(tokenizer, asks_the_calculator), tokenizer, settings)
        asked = prompts(tokenizer, "2*3=", "4*5=")
        found = answers(service, asked, training=True)
        lengths = [len(row) for row in asked.jagged("prompt_ids")]
        for number, (routes, ids, mask) in enumerate(
            zip(*map(found.jagged, (ROUTES, "response_ids", "response_mask")), strict=True)
        ):
            assert routes.shape == (lengths[number] + len(ids), 3, 2)
            assert found[ROUTED][number] == (routes[:, 0, 0] != FREE).sum()
            if loop == "fails_for_two":
                wanted = [FREE if number else 0] * (len(routes) - 1)
            else:
                # tokens of the prompt and of the first answer
                first = lengths[number] + int(np.argmin(mask))
                wanted = [number] * (first - 1) + [2 + number] * (len(routes) - first)
            assert (routes[:-1].reshape(-1, 6) == np.array(wanted)[:, None]).all() and (
                routes[-1] == FREE
            ).all()
    assert ROUTES not in answers(
        Conversations(Engines(tokenizer, lambda _: "7"), tokenizer, settings), asked, training=False
    )


def test_a_conversation_whose_tool_was_lost_is_not_trained_on_and_the_others_go_on(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "lost.py").write_text(
        "from hybridflow.agents.tools.base import ToolLostError, tool\n\n"
        "@tool('calculator')\ndef calculator(expression: str) -> str:\n"
        "    if expression.startswith('4'):\n        raise ToolLostError('its server has "
        "ended')\n    return '6'\n"
    )
    settings = config(loop="tools", tools=(f"{tmp_path}/lost.py:calculator",), call_format="tags")
    service = Conversations(Engines(tokenizer, asks_the_calculator), tokenizer, settings)
    found = answers(service, prompts(tokenizer, "2*3=", "4*5="), training=True)
    assert found["agent_failure"].tolist() == [None, "its server has ended"]
    assert [bool(row.any()) for row in found.jagged("response_mask")] == [True, False]


def test_one_turn_needs_no_conversation(tokenizer: Tokenizer) -> None:
    engines = Engines(tokenizer, lambda _: "7")
    assert conversing(engines, tokenizer, config()) is engines
    with pytest.raises(ConfigError, match=r"rollout.agent.loop=tool: .*did you mean 'tools'"):
        conversing(engines, tokenizer, config(loop="tool"))


@pytest.mark.slow
def test_settings_without_sense_are_refused() -> None:
    def said(**agent: Any) -> str:
        return "\n".join(problems(config(**agent), files=False))

    assert "calls no tools; set rollout.agent.loop=tools" in said(tools=("calculator",))
    assert "rollout.agent.loop=tools requires rollout.agent.tools" in said(loop="tools")
    assert "rollout.agent" not in said(loop="tools", tools=("calculator",))
    assert "rollout.agent.loop=environment requires rollout.agent.environment" in said(
        loop="environment"
    )
    assert "rollout.agent.environment=guess has no effect" in said(environment="guess")
    assert "rollout.agent" not in said(loop="environment", environment="guess")
