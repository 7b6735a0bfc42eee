"""Flows of a user's own: they are the loop, and what they do wrong is named with their line."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow.batch import DataProto
from hybridflow.config.entries import FLOWS
from hybridflow.errors import ConfigError, FlowError, HybridFlowError, WorkerError
from hybridflow.single_controller import block_on
from hybridflow.trainer import flow_watch
from tests.unit.flows.bodies import BEGIN, FIRST, GRPO, fitted, following, own
from tests.unit.trainer.worlds import N, World, config_of, records, trainer_of


def error_of(tmp_path: Path, body: str, roles: tuple[str, ...] = ("policy", "reference")) -> str:
    config = following(config_of(tmp_path / "run"), own(tmp_path, body, roles))
    with pytest.raises(HybridFlowError) as caught:
        fitted(trainer_of(config, World()))
    return str(caught.value)


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_a_flow_in_a_file_makes_the_calls_of_the_built_in_one(tmp_path: Path, kl: float) -> None:
    calls = []
    metrics = []
    for name in (None, own(tmp_path, GRPO)):
        world = World()
        config = following(config_of(tmp_path / str(len(calls)), kl, test_every_steps=2), name)
        trainer = fitted(trainer_of(config, world))
        calls.append(world.calls)
        metrics.append(
            [
                {
                    key: value
                    for key, value in record.items()
                    if not key.startswith(
                        ("timing_", "perf", "controller", "seconds", "wall_time", "sync/seconds")
                    )
                }
                for record in records(trainer, "train")
            ]
        )
    assert calls[0] == calls[1] and "update" in calls[0] and len(metrics[0]) == 3
    assert metrics[0] == metrics[1]


ENDS = [
    ("    if step == 2:\n        return\n", ""),
    ("    if step == 2:\n        break\n", ""),
    # before it has called anything in step 3
    ("", "    if step == 3:\n        return\n"),
]


@pytest.mark.parametrize(("after", "before"), ENDS)
@pytest.mark.parametrize("every", [0, 2])
def test_a_flow_that_ends_early_ends_the_run_as_its_last_step_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], after: str, before: str, every: int
) -> None:
    body = GRPO.replace(
        "    batch = await run.samples()", before + "    batch = await run.samples()"
    )
    config = config_of(
        tmp_path / "run",
        total_steps=9,
        save_every_steps=every,
        test_every_steps=every,
        loggers=("jsonl", "console"),
    )
    trainer = fitted(trainer_of(following(config, own(tmp_path, body + after)), World()))
    block_on(trainer.session.store.wait())
    latest = trainer.session.store.latest()
    assert trainer.step == 2 and latest is not None and latest.step == 2
    assert [record["step"] for record in records(trainer, "train")] == [1, 2]
    assert [record["step"] for record in records(trainer, "val")] == [0, 2]
    assert "the flow ended the run after step 2 of 9" in capsys.readouterr().out


def test_a_resumed_flow_that_has_ended_ends_at_once(tmp_path: Path) -> None:
    body = f"if run.state.get('done'):\n    return\n{GRPO}    run.state['done'] = True\n    return"
    config = following(config_of(tmp_path / "run", total_steps=9), own(tmp_path, body))
    fitted(trainer_of(config, World())).session.close()
    world = World()
    trainer = trainer_of(config, world)
    checkpoint = trainer.session.store.latest()
    assert checkpoint is not None and checkpoint.step == 1

    async def go_on() -> None:
        await trainer.resume(checkpoint)
        await trainer.fit()

    block_on(go_on())
    assert trainer.step == 1 and "generate" not in world.calls


def test_a_flow_in_two_phases_leaves_the_first_loop_and_begins_another(tmp_path: Path) -> None:
    body = GRPO + "    if step == 1:\n        break\n" + GRPO
    config = following(config_of(tmp_path / "run"), own(tmp_path, body))
    trainer = fitted(trainer_of(config, World()))
    assert [record["step"] for record in records(trainer, "train")] == [1, 2, 3]


def test_numbers_that_a_flow_records_are_metrics_of_their_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = (
        BEGIN + "    run.record(cost=np.float32(step / 2))\n    if step == 2:\n        continue\n"
    )
    body = "import numpy as np\n" + body + GRPO.split("samples()\n", 1)[1]
    config = config_of(tmp_path / "run", loggers=("jsonl", "console"))
    trainer = fitted(trainer_of(following(config, own(tmp_path, body)), World()))
    assert "  cost 1.000" in capsys.readouterr().out
    found = records(trainer, "train")
    assert [record["flow/cost"] for record in found] == [0.5, 1.0, 1.5]
    assert not any("critic/sampled_score/mean" in record for record in found)


def test_a_score_that_a_flow_replaces_is_shown_with_the_sampled_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = GRPO.replace(
        "    batch = await run.all",
        "    batch = batch.with_columns(scores=batch['scores'] - 1)\n    batch = await run.all",
    )
    config = config_of(tmp_path / "run", total_steps=1, loggers=("jsonl", "console"))
    trainer = fitted(trainer_of(following(config, own(tmp_path, body)), World()))
    assert "reward -0.500  ppo_kl 0.050  length 2.875  sampled 0.500" in capsys.readouterr().out
    (record,) = records(trainer, "train")
    assert record["critic/score/mean"] == -0.5 and record["critic/sampled_score/mean"] == 0.5


OWN_ADVANTAGES = GRPO.replace(
    "    batch = run.advantages(batch)\n",
    """    from hybridflow import Jagged
    import numpy as np
    offsets = batch["response_ids"].offsets
    batch = batch.with_columns(advantages=Jagged(VALUES, offsets))
""",
)


def test_advantages_of_a_flow_are_trained_on(tmp_path: Path) -> None:
    body = OWN_ADVANTAGES.replace("VALUES", "np.arange(float(offsets[-1]))")
    world = World()
    seen = list[DataProto]()
    update = world.update

    async def noted(method: Any, batch: DataProto, seed: int | None = None) -> Any:
        seen.append(batch)
        return await update(method, batch, seed)

    world.update = noted  # type: ignore[method-assign]
    config = following(config_of(tmp_path / "run", total_steps=1), own(tmp_path, body))
    trainer = fitted(trainer_of(config, world))
    values = seen[0].jagged("advantages").values
    assert values.dtype == np.float32 and values.tolist() == list(range(len(values)))
    (record,) = records(trainer, "train")
    assert record["critic/advantages/max"] == len(values) - 1
    assert "critic/rewards/mean" not in record


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            OWN_ADVANTAGES.replace("VALUES", "np.where(np.arange(offsets[-1]) == 4, np.nan, 0)"),
            r"step 1: the flow set the column advantages to a non-finite value in row 1 of 8",
        ),
        (
            GRPO.replace(
                "run.advantages(batch)",
                "run.advantages(batch.with_columns(scores=batch['scores'] / 0))",
            ),
            r"step 1: the flow set the column scores to a non-finite value in row 0, 1, 2, 3, 4 and 3 more of 8",
        ),
        (
            GRPO.replace("    await run.pol", "    batch = batch.rows([0])\n    await run.pol"),
            r"step 1: policy.update\(batch\): got 1 of 8 rows, .* `batch = run.leave_out\(",
        ),
        (GRPO + "    if step == 2: 1 / 0", r"step 2: ZeroDivisionError: .* \(line 12\)$"),
    ],
)
def test_an_error_of_a_run_names_step_and_line(tmp_path: Path, body: str, message: str) -> None:
    text = error_of(tmp_path, body)
    assert re.search(message, text) and re.search(r"\(line \d+\)$", text), text


def test_the_line_comes_before_the_tail_of_a_log(tmp_path: Path) -> None:
    world = World()

    async def lost(*given: Any) -> Any:
        raise WorkerError("a rank was lost", log_tail="its last line")

    world.update_and_score = lost  # type: ignore[method-assign]
    config = following(config_of(tmp_path / "run"), own(tmp_path, GRPO))
    with pytest.raises(WorkerError) as caught:
        fitted(trainer_of(config, world))
    first, *_, last = str(caught.value).splitlines()
    assert ": step 1: a rank was lost" in first and first.endswith("(line 10)")
    assert last == "its last line"


@pytest.mark.parametrize("wait", ["await asyncio.sleep", "time.sleep"])
def test_a_flow_that_makes_no_call_for_long_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wait: str,
) -> None:
    monkeypatch.setattr(flow_watch, "_FIRST_S", 0.05)
    body = f"import asyncio, time\n{GRPO.strip()}\n    if step == 2:\n        {wait}(0.4)\n"
    config = config_of(tmp_path / "run", loggers=("jsonl", "console"))
    fitted(trainer_of(following(config, own(tmp_path, body)), World()))
    said = capsys.readouterr().out.splitlines()
    found = [line for line in said if "without calling a method of the run" in line]
    assert any(line.startswith("step 2: the flow has been at line 14 for") for line in found), said


def test_rows_that_are_left_out_have_no_token_that_counts(tmp_path: Path) -> None:
    body = GRPO.replace(
        "    batch = run.adv",
        "    batch = run.leave_out(batch, batch['scores'] < 1)\n"
        "    run.record(kept=batch['response_mask'].values.sum())\n    batch = run.adv",
    )
    config = following(config_of(tmp_path / "run", total_steps=1), own(tmp_path, body))
    (record,) = records(fitted(trainer_of(config, World())), "train")
    # of every second of answers of 2, 3, 4, 2, ... tokens
    assert record["flow/kept"] == 2 + 4 + 3 + 2


def test_a_step_without_an_update_is_recorded_and_trains_nothing(tmp_path: Path) -> None:
    body = GRPO.replace(
        "    batch = await run.all",
        "    if step == 2:\n        continue\n    batch = await run.all",
    )
    world = World()
    config = following(config_of(tmp_path / "run", test_every_steps=2), own(tmp_path, body))
    trainer = fitted(trainer_of(config, world))
    assert world.calls.count("update") == 2 and trainer.step == 3
    # engines that gave their memory back have it again, with the weights
    assert [call for call in world.calls if call.startswith("sync")] == [
        f"sync {step}" for step in range(4)
    ]
    block_on(trainer.session.store.wait())
    latest = trainer.session.store.latest()
    assert latest is not None and latest.step == 3
    validated = [record["step"] for record in records(trainer, "val")]
    assert validated == [0, 2, 3]
    assert [record["step"] for record in records(trainer, "train")] == [1, 2, 3]


def test_a_last_step_without_an_update_is_saved(tmp_path: Path) -> None:
    body = BEGIN + "    if step % 2 == 0:\n        continue\n" + GRPO.split("samples()\n", 1)[1]
    config = config_of(tmp_path / "run", total_steps=4, save_every_steps=2)
    trainer = fitted(trainer_of(following(config, own(tmp_path, body)), World()))
    block_on(trainer.session.store.wait())
    latest = trainer.session.store.latest()
    assert latest is not None and latest.step == 4
    trainer.session.close()


COUNTING = (
    GRPO
    + """    run.state["seen"] = [*run.state.get("seen", []), step]
"""
)


def test_a_resumed_flow_goes_on_after_the_checkpoint_with_its_state(tmp_path: Path) -> None:
    name = own(tmp_path, COUNTING)
    first = following(config_of(tmp_path / "run", total_steps=2), name)
    fitted(trainer_of(first, World())).session.close()
    world = World()
    trainer = trainer_of(following(config_of(tmp_path / "run", total_steps=3), name), world)
    checkpoint = trainer.session.store.latest()
    assert checkpoint is not None

    async def go_on() -> None:
        await trainer.resume(checkpoint)
        assert trainer.state == {"seen": [1, 2]}
        await trainer.fit()

    block_on(go_on())
    assert trainer.step == 3 and world.calls.count("update") == 1
    assert trainer.state == {"seen": [1, 2, 3]}


@pytest.mark.parametrize("value", ["object()", "(1, 2)", "{1: 2}", "float('nan')"])
def test_a_state_that_would_come_back_otherwise_is_refused(tmp_path: Path, value: str) -> None:
    text = error_of(tmp_path, GRPO + f"    run.state['x'] = {value}\n")
    assert "run.state cannot be saved" in text, text


@pytest.mark.parametrize(
    ("body", "message", "line"),
    [
        (
            GRPO.replace("    await run.sync()\n", ""),
            "call `await run.sync()` after policy.update",
            4,
        ),
        (
            GRPO.replace("    await run.policy.update(batch)", "    run.policy.update(batch)"),
            "step 1: run.policy.update(batch) is never awaited",
            4,
        ),
        (
            BEGIN + "    run.reference.log_probs(batch)",
            "reference.log_probs(batch) is never awaited",
            2,
        ),
        (
            BEGIN + "    await run.reference.update(batch)",
            "the reference cannot be trained; only run.policy, run.critic, run.cost_critic can be updated",
            2,
        ),
        (
            BEGIN + "    await run.critic.values(batch)",
            "run.critic was called, but the flow declares",
            2,
        ),
        (BEGIN + "    await run.samples()", "samples() was called twice in a step", 2),
        (BEGIN + "    await run.sync()", "sync() must be called after policy.update(batch)", 2),
        (BEGIN + "    await run.all(batch)", "all(...) accepts only role calls", 2),
        (BEGIN + "    await run.all()", "all(...) requires at least one role call", 2),
        (
            GRPO.replace("await run.policy.update(batch)", "run.later(run.policy.update(batch))"),
            "later(...): expected an update of a critic",
            4,
        ),
        (
            BEGIN + "    await run.policy.update(batch)",
            "call `await run.policy.log_probs(batch)`",
            2,
        ),
        (
            BEGIN + "    await run.policy.update(await run.policy.log_probs(batch))",
            "the batch has no advantages; call `batch = run.advantages(batch)`",
            2,
        ),
        (BEGIN + "    raise ValueError('mine')", "ValueError: mine", 2),
        (BEGIN + "    raise SystemExit(0)", "SystemExit: 0", 2),
        (BEGIN + "    batch['nothing']", "nothing", 2),
        ("await run.samples()", "samples() was called outside a step", 0),
        ("return None", "the flow ended without running a step", -2),
    ],
)
def test_what_a_flow_does_wrong_is_named_with_its_line(
    tmp_path: Path, body: str, message: str, line: int | None
) -> None:
    text = error_of(tmp_path, body)
    assert message in text and text.startswith("algorithm.flow="), text
    if line is not None:
        assert text.endswith(f"(line {FIRST + line})"), text


def test_an_update_that_was_refused_may_be_called_again(tmp_path: Path) -> None:
    """The pass of its later rows is still there."""
    body = GRPO.replace(
        "    batch = run.advantages(batch)\n",
        "    from hybridflow import HybridFlowError\n"
        "    try:\n"
        "        run.policy.update(batch)\n"
        "    except HybridFlowError as error:\n"
        "        assert 'has no advantages' in str(error)\n"
        "    batch = run.advantages(batch)\n",
    )
    config = following(config_of(tmp_path / "run", total_steps=2), own(tmp_path, body))
    config = replace(config, actor=replace(config.actor, ppo_mini_batch_size=1))
    world = World()
    world.first_rows = N
    trainer = fitted(trainer_of(config, world))
    assert world.calls.count("update") == 2 and len(records(trainer, "train")) == 2


def test_log_probs_of_a_step_are_not_those_of_the_next(tmp_path: Path) -> None:
    body = BEGIN + (
        "    if step == 1:\n        await run.policy.log_probs(batch)\n        continue\n"
        "    await run.policy.update(run.advantages(batch))\n"
    )
    config = following(config_of(tmp_path / "run"), own(tmp_path, body))
    config = replace(config, actor=replace(config.actor, ppo_mini_batch_size=1))
    world = World()
    world.first_rows = N
    with pytest.raises(FlowError, match=r"step 2: .*the old log-probs have not been computed"):
        fitted(trainer_of(config, world))


def test_updates_of_a_frozen_reference_are_refused(tmp_path: Path) -> None:
    name = own(tmp_path, BEGIN + "    await run.reference.update(batch)")
    config = following(config_of(tmp_path / "run", kl=0.1), name)
    with pytest.raises(FlowError, match=r"the reference cannot be trained; .* \(line 8\)"):
        fitted(trainer_of(config, World()))


def test_an_unknown_role_is_refused_where_the_flow_is_registered(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown role 'polisy'; did you mean 'policy'"):
        FLOWS.get(own(tmp_path, GRPO, ("polisy",)))


@pytest.mark.parametrize("name", list(FLOWS.names()))
def test_a_built_in_flow_is_short_and_declares_what_it_calls(name: str) -> None:
    entry: Any = FLOWS.get(name)
    source = inspect.getsource(entry.body)
    called = set(re.findall(r"run\.(\w+)\.", source)) - {"options", "state"}
    assert called <= set(entry.roles) and len(source.splitlines()) <= 30
    assert set(entry.roles) - called <= {"policy"}
