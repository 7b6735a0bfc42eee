"""The check of a user's flow before anything starts: what it refuses, with the line, and what it
leaves to the run."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridflow.config import explain
from hybridflow.config.check_entries import problems
from hybridflow.config.entries import FLOWS
from hybridflow.config.schema import AlgorithmConfig, RunConfig
from hybridflow.errors import ConfigError
from hybridflow.trainer import flow_check
from hybridflow.trainer.flow_check import check_flow
from tests.unit.flows.bodies import BEGIN, GRPO, following, own
from tests.unit.trainer.worlds import config_of


def checked(config: RunConfig) -> list[str]:
    """What the check before the start says."""
    said = list[str]()
    check_flow(config, said.append)
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (GRPO.replace("    await run.sync()\n", ""), r"call `await run.sync\(\)`.*\(line 10\)$"),
        (GRPO.replace("await run.policy.update", "run.policy.update"), "is never awaited"),
        (GRPO.replace("run.advantages(batch)", "batch"), r"no advantages.*\(line 10\)$"),
        (
            GRPO.replace("    batch = await run.all", "    await run.all"),
            r"no column 'old_log_probs'.*line 9",
        ),
        (GRPO.replace("run.reference", "run.teacher"), r"run.teacher was called.*\(line 8\)$"),
        (BEGIN + "    batch['nothing']", r"no column 'nothing'.*\(line 8\)$"),
        (GRPO + GRPO.split("batch)\n", 1)[1].rsplit("    await run.sync", 1)[0], "called twice"),
        (
            BEGIN + "    while True:\n        await run.policy.log_probs(batch)",
            "more than 1000 role calls",
        ),
    ],
)
def test_a_flow_is_refused_before_anything_starts(tmp_path: Path, body: str, message: str) -> None:
    config = following(config_of(tmp_path / "run", kl=0.1), own(tmp_path, body))
    config = replace(config, algorithm=replace(config.algorithm, kl_coef=0.1))
    with pytest.raises(ConfigError, match=message):
        checked(config)


def test_code_that_fails_on_invented_values_is_a_warning(tmp_path: Path) -> None:
    body = BEGIN + "    1 / int(batch['scores'].max() - 1)"
    (line,) = checked(following(config_of(tmp_path / "run"), own(tmp_path, body)))
    assert line.startswith("warning: ") and "ZeroDivisionError: division by zero (line 8)" in line


def test_a_flow_knows_that_it_is_checked(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    body = f"if not run.is_tracing:\n    open({str(mark)!r}, 'w')\n" + GRPO.strip()
    assert checked(following(config_of(tmp_path / "run"), own(tmp_path, body))) == []
    assert not mark.exists()


@pytest.mark.parametrize(
    ("name", "algorithm", "others"),
    [
        ("grpo", {}, {}),
        ("grpo", {"kl_coef": 0.1}, {}),
        ("grpo", {"adv_estimator": "optimal_token_baseline"}, {}),
        ("ppo", {"adv_estimator": "gae"}, {}),
        ("remax", {"adv_estimator": "remax"}, {}),
        ("dpo", {"adv_estimator": "dpo"}, {"data": {"answers": "pairs"}}),
        ("distill", {}, {"teacher": {"path": "teacher"}}),
        ("rollouts", {}, {"trainer": {"rollout_only": True}}),
    ],
)
def test_the_check_finds_nothing_in_the_built_in_flows(
    tmp_path: Path, name: str, algorithm: dict[str, Any], others: dict[str, Any]
) -> None:
    entry: Any = FLOWS.get(name)
    body = inspect.getsource(entry.body).partition("async for")[2]
    flow = own(tmp_path, textwrap.dedent("    async for" + body), entry.roles)
    config = config_of(tmp_path / "run", kl=0.1)
    for section, values in others.items():
        config = replace(config, **{section: replace(getattr(config, section), **values)})
    assert checked(replace(config, algorithm=AlgorithmConfig(flow=flow, **algorithm))) == []


def refusal(tmp_path: Path, body: str, roles: tuple[str, ...] = ("policy", "reference")) -> str:
    """The message with which the check refuses the flow."""
    with pytest.raises(ConfigError) as caught:
        checked(following(config_of(tmp_path / "run", kl=0.1), own(tmp_path, body, roles)))
    text = str(caught.value)
    assert text.startswith(f"algorithm.flow={tmp_path / 'own_flow.py'}:mine: "), text
    return text


HELPER = """
async def log_probs(batch):
    return await run.policy.log_probs(batch)

async for step in run.steps():
    batch = await run.samples()
"""
PASSES = "await run.all(run.policy.log_probs(batch), run.reference.log_probs(batch))"


@pytest.mark.parametrize(
    ("body", "message", "line"),
    [
        # loops
        (GRPO.replace("async for", "for"), "write `async for step in run.steps():`", 6),
        (GRPO.replace("run.steps()", "run.steps"), "write `async for step in run.steps():`", 6),
        (
            BEGIN + "    async for other in run.steps():\n        break",
            "nested loops over run.steps() are not supported",
            6,
        ),
        (
            BEGIN + "    async for other in run.steps():\n        pass\n    await run.sync()",
            "outside a step; another loop over run.steps() has consumed all of them",
            10,
        ),
        ("async for step in run.steps():\n    return", "ended without running a step", 4),
        # calls that are not awaited
        (GRPO.replace("await run.samples()", "run.samples()"), "write `await run.samples()`", 8),
        (GRPO.replace("await run.all(", "run.all("), "write `await run.all(...)`", 9),
        (GRPO.replace("await run.sync()", "run.sync()"), "run.sync() is never awaited", 11),
        (BEGIN + "    run.policy.log_probs(batch)", "policy.log_probs(batch) is never awaited", 8),
        (
            BEGIN + "    run.advantages(run.policy.log_probs(batch))",
            "write `await run.policy.log_probs(batch)`",
            8,
        ),
        (
            BEGIN + "    batch = run.policy.log_probs(batch)\n    batch['scores']",
            "run.policy.log_probs(batch) on line 8 is not awaited",
            9,
        ),
        (
            BEGIN + "    batch = run.policy.log_probs(batch)\n    batch.with_columns()",
            "has no 'with_columns'; write `await run.policy.log_probs(batch)`",
            9,
        ),
        (
            BEGIN + "    batch = run.policy.log_probs(batch)\n    await batch\n    await batch",
            "run.policy.log_probs(batch) on line 8 is awaited twice",
            10,
        ),
        (
            BEGIN + "    len(run.policy.log_probs(batch))",
            "a call that is not awaited has no len",
            8,
        ),
        (
            HELPER + "    batch = run.advantages(log_probs(batch))",
            "expected a batch, got the coroutine log_probs(...), which is not awaited",
            11,
        ),
        (HELPER + "    log_probs(batch)", "coroutine mine.<locals>.log_probs(...) is never", 11),
        (
            HELPER + "    batch = log_probs(batch)\n    batch.lengths('response_ids')",
            "'log_probs' is a coroutine that is not awaited, and has no 'lengths'",
            12,
        ),
        (BEGIN + "    await run.samples", "a method that is not called is awaited", 8),
        (GRPO.replace("= run.adv", "= await run.adv"), "a batch is awaited. Only samples,", 9),
        (
            BEGIN + "    import asyncio\n    asyncio.create_task(run.policy.log_probs(batch))",
            "calls on the run start immediately",
            9,
        ),
        # arguments
        (BEGIN + "    run.advantages(None)", "got None; is a `return` missing", 8),
        (BEGIN + "    run.advantages(batch['scores'])", "got a value of type ndarray", 8),
        (BEGIN + "    run.advantages(run.samples)", "which is not called; add `()`", 8),
        (BEGIN + "    run.advantages()", "run.advantages() missing 1 required", 8),
        (BEGIN + "    run.policy.update(batch, 1)", "run.policy.update() takes 2 positional", 8),
        (BEGIN + "    await run.all([run.policy.log_probs(batch)])", "write run.all(*calls)", 8),
        (
            BEGIN + "    await run.all(await run.policy.log_probs(batch))",
            "got a batch; remove `await`",
            8,
        ),
        (
            BEGIN + "    await run.all(run.sync())",
            "sync() is not a role call; write `await run.sync()`",
            8,
        ),
        (
            GRPO.replace("await run.policy.update(batch)", "run.all(run.policy.update(batch))"),
            "policy.update(batch) adds no column; write `await run.policy.update(batch)` on a separate line",
            10,
        ),
        (
            GRPO.replace("reference.log_probs(batch)", "reference.log_probs(batch.rows([0]))"),
            "reference.log_probs(batch) uses a different batch from policy.log_probs(batch)",
            8,
        ),
        (
            GRPO.replace("run.all", "__import__('asyncio').gather"),
            "got a value of type list; run.all(...) joins calls to one batch",
            9,
        ),
        (
            BEGIN + "    import asyncio\n    asyncio.run(asyncio.sleep(0))",
            "a flow already runs in one; use `await` instead",
            9,
        ),
        (
            GRPO.replace("    batch = run.adv", "    run.adv"),
            "the batch has no advantages; call `batch = run.advantages(batch)` first",
            10,
        ),
        # names
        (GRPO.replace("run.samples()", "run.sample()"), "no 'sample'; did you mean 'samples'?", 7),
        (GRPO.replace("y.log_probs", "y.log_prob"), "run.policy has no 'log_prob'; did you", 8),
        (GRPO.replace("policy.up", "polcy.up"), "run has no 'polcy'; did you mean 'policy'?", 10),
        (
            BEGIN + "    batch['score']",
            "no column 'score'; did you mean 'scores'? The columns are",
            8,
        ),
        (BEGIN + "    batch.scores", "to read the column, write batch['scores']", 8),
        (BEGIN + "    batch.with_column()", "did you mean 'with_columns'?", 8),
        (BEGIN + "    batch['scores'] = 1", "batch = batch.with_columns(scores=...)", 8),
        (BEGIN + "    batch.scores = 1", "batch = batch.with_columns(scores=...)", 8),
        (BEGIN + "    batch['scores'][0] = 1", "write batch.with_columns(scores=...)", 8),
        (BEGIN + "    run.seen = step", "store values that must survive in run.state['seen']", 8),
        (BEGIN + "    run.state = {}", "store values that must survive in run.state[name]", 8),
        (BEGIN + "    batc", "NameError: name 'batc' is not defined", 8),
        (BEGIN + "    import no_such_module", "No module named 'no_such_module'", 8),
        # roles
        (
            BEGIN + "    await run.critic.values(batch)",
            "write @flow('mine', roles=('policy', 'reference', 'critic')) on line 4",
            8,
        ),
        (
            BEGIN + "    batch = " + PASSES,
            "never calls run.policy.update(batch): it would train",
            4,
        ),
        # state
        (
            GRPO + "    run.state['x'] = (1,)",
            "run.state['x'] is (1,) (tuple), which would be restored",
            6,
        ),
        (GRPO + "    run.state['x'] = {1: 2}", "which would be restored as {'1': 2}", 6),
        (GRPO + "    run.state['x'] = float('nan')", "run.state['x'] is nan (float)", 6),
        (GRPO + "    run.state['x'] = batch['scores'].mean()", "`float(value)`", 6),
        (GRPO + "    run.state[1] = 1", "the key 1 is not a string; use '1'", 6),
        # columns of its own
        (
            GRPO.replace("run.advantages(batch)", "batch.with_columns(advantages=batch['scores'])"),
            "advantages must have one value per token of the answers; write Jagged(",
            10,
        ),
        (
            GRPO.replace("    await run.pol", "    batch = batch.rows([0])\n    await run.pol"),
            "policy.update(batch): got 1 of 4 rows, but each update requires 128: keep all",
            11,
        ),
        (
            BEGIN + "    run.advantages(batch.with_columns(scores=batch['scores'] / 0))",
            "step 1: the flow set the column scores to a non-finite value in row 0, 1, 2, 3 of 4",
            8,
        ),
        # results that are dropped
        (
            GRPO.replace(
                "    batch = run.adv",
                "    batch.with_columns(scores=batch['scores'])\n    batch = run.adv",
            ),
            "a batch is immutable, but the result of batch.with_columns(...) is dropped; write "
            "`batch = batch.with_columns(...)`",
            9,
        ),
        (
            GRPO.replace(
                "    await run.pol",
                "    run.leave_out(batch, batch['scores'] < 1)\n    await run.pol",
            ),
            "the result of run.leave_out(...) is dropped; write `batch = run.leave_out(...)`",
            10,
        ),
        (
            "def shaped(given):\n    if step:\n        given.with_columns(scores=1)\n    return given\n"
            + GRPO,
            "is dropped; write `given = given.with_columns(...)`",
            8,
        ),
        (
            GRPO.replace(
                "    batch = run.adv", "    kept = batch\n    kept.rows([0])\n    batch = run.adv"
            ),
            "write `kept = kept.rows(...)`",
            10,
        ),
        (
            GRPO + "    run.record(loss=float('inf'))",
            "record(loss=...) must be a finite number",
            12,
        ),
        (GRPO + "    run.record(loss='high')", "must be a finite number, got 'high'", 12),
        (BEGIN + "    exit()", "to end the run, use `return`", 8),
    ],
)
def test_a_mistake_is_refused_before_anything_starts(
    tmp_path: Path, body: str, message: str, line: int
) -> None:
    text = refusal(tmp_path, body)
    assert message in text and text.endswith(f"(line {line})"), text


@pytest.mark.parametrize(
    ("wait", "line"), [("await asyncio.Event().wait()", 9), ("while True: pass", 9)]
)
def test_a_flow_that_does_not_end_is_refused_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: str, line: int
) -> None:
    monkeypatch.setattr(flow_check, "_LIMIT_S", 0.2)
    monkeypatch.setattr(flow_check, "_GRACE_S", 0.1)
    # a loop that ends after the test
    wait = wait.replace("while True", "import time; t = time.time()\n    while time.time() < t + 1")
    text = refusal(tmp_path, BEGIN + f"    import asyncio\n    {wait}")
    assert "put code that waits or computes for a long time under `if not run.is_tracing:`" in text
    assert text.endswith((f"(line {line})", f"(line {line + 1})")), text


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("@flow\nasync def mine(run):", "write @flow('mine', roles=('policy',)) (line 4)"),
        ("@flow()\nasync def mine(run):", "write @flow('mine', roles=('policy',)) (line 4)"),
        (
            "@flow('mine')\nasync def mine(run):",
            "flow 'mine' declares no roles; write @flow('mine', roles=('policy',)) (line 4)",
        ),
        (
            "@flow('mine', roles='policy')\nasync def mine(run):",
            "roles must be a tuple; write roles=('policy',) (line 4)",
        ),
        ("@flow('mine', roles=('polisy',))\nasync def mine(run):", "did you mean 'policy'?"),
        (
            "@flow('mine', roles=('policy',))\ndef mine(run):",
            "is not an async function; write `async def mine(run):` (line 4)",
        ),
        (
            "@flow('mine', roles=('policy',))\nasync def mine(run, config):",
            "must take one argument, the run; write `async def mine(run):`",
        ),
        ("@flow('mine', roles=('policy',))\nasync def mine():", "must take one argument, the run"),
        (
            "@flow('mine', roles=('policy',))\nasync def mine(run):\n    yield",
            "contains `yield`: a flow must not be a generator",
        ),
    ],
)
def test_what_is_no_flow_is_refused_where_it_is_registered(
    tmp_path: Path, head: str, message: str
) -> None:
    file = tmp_path / "own_flow.py"
    file.write_text(f"\nfrom hybridflow import flow\n\n{head}\n    run.policy\n")
    with pytest.raises(ConfigError) as caught:
        FLOWS.get(f"{file}:mine")
    assert message in str(caught.value), caught.value


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_coroutine_of_somebody_else_is_no_mistake_of_the_flow(tmp_path: Path) -> None:
    async def stray() -> None: ...

    box = SimpleNamespace(coroutine=stray())
    box.itself = box  # collected while the flow is checked
    del box
    body = "import gc\n" + GRPO + "    gc.collect()\n"
    assert checked(following(config_of(tmp_path / "run"), own(tmp_path, body))) == []


def test_a_file_that_is_no_python_is_named_with_its_line_once(tmp_path: Path) -> None:
    file = tmp_path / "own_flow.py"
    file.write_text("x = 1\nprint(\n")
    with pytest.raises(
        ConfigError, match=r"imported: SyntaxError: '\(' was never closed \(line 2\)$"
    ):
        FLOWS.get(f"{file}:mine")


def test_a_second_flow_of_a_name_is_refused_with_both_lines(tmp_path: Path) -> None:
    file = tmp_path / "own_flow.py"
    one = "@flow('mine', roles=('policy',))\nasync def {}(run):\n    run.policy\n\n"
    file.write_text("from hybridflow import flow\n\n" + one.format("first") + one.format("mine"))
    with pytest.raises(ConfigError) as caught:
        FLOWS.get(f"{file}:mine")
    assert str(caught.value) == (
        f"{file} (algorithm.flow) could not be imported: the flow 'mine' is already registered on line 3; rename one of the two (line 7)"
    )
    file.write_text("from hybridflow import flow\n\n" + one.format("mine"))
    assert FLOWS.get(f"{file}:mine").line == 3  # the file that was refused has left nothing


def test_a_built_in_flow_that_the_estimator_does_not_fit_is_refused(tmp_path: Path) -> None:
    algorithm = AlgorithmConfig(flow="grpo", adv_estimator="remax")
    with pytest.raises(ConfigError, match=r"algorithm.flow=grpo: .*run.samples\(greedy=True\)"):
        checked(replace(config_of(tmp_path / "run"), algorithm=algorithm))


def test_a_module_next_to_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "next_to_it.py").write_text("")
    (tmp_path / "own_flow.py").write_text("import next_to_it\n")
    with pytest.raises(ConfigError, match=rf"\(line 1\); .* set PYTHONPATH={tmp_path}$"):
        FLOWS.get(f"{tmp_path / 'own_flow.py'}:mine")


def test_a_critic_that_never_learns_is_refused(tmp_path: Path) -> None:
    body = GRPO.replace(PASSES, PASSES.replace("run.reference.log_probs", "run.critic.values"))
    name = own(tmp_path, body, ("policy", "critic"))
    config = replace(
        config_of(tmp_path / "run"), algorithm=AlgorithmConfig(flow=name, adv_estimator="gae")
    )
    with pytest.raises(ConfigError, match=r"never calls run.critic.update\(batch\): it would"):
        checked(config)


def test_an_update_that_the_two_steps_do_not_reach_is_a_warning(tmp_path: Path) -> None:
    body = BEGIN + "    if step < 3:\n        continue\n" + GRPO.split("samples()\n", 1)[1]
    said = checked(following(config_of(tmp_path / "run"), own(tmp_path, body)))
    assert (
        len(said) == 1
        and "run.policy.update(batch) was not called in any of the 2 steps" in said[0]
    )


def test_results_that_are_kept_and_methods_of_other_objects_are_no_mistakes(tmp_path: Path) -> None:
    body = (
        "from types import SimpleNamespace\ntable = SimpleNamespace(rename=print)\n"
        + GRPO
        + "    table.rename()\n    run.state['x'] = len(batch.rows([0]))\n"
        + "    print(batch.with_columns())\n    other = batch.select(['scores'])\n"
    )
    assert checked(following(config_of(tmp_path / "run"), own(tmp_path, body))) == []


def test_fewer_rows_are_a_warning_where_they_may_divide(tmp_path: Path) -> None:
    body = GRPO.replace("    await run.pol", "    batch = batch.rows([0])\n    await run.pol")
    config = following(config_of(tmp_path / "run", kl=0.1), own(tmp_path, body))
    config = replace(config, actor=replace(config.actor, ppo_mini_batch_size=2))
    (line,) = checked(config)
    assert "got 1 of 4 rows, but each update requires 4" in line


OPTIONS = """
from dataclasses import dataclass
from hybridflow import flow

@dataclass(frozen=True)
class Options:
    target: float = 0.25

@flow("mine", roles=("policy", "reference"), options=Options)
async def mine(run):
"""


def test_options_of_a_flow_are_explained(tmp_path: Path) -> None:
    algorithm = AlgorithmConfig(flow="rejection", flow_options={"best": 2})
    config = replace(config_of(tmp_path / "run"), algorithm=algorithm)
    assert "reward_model; threshold=0.0, best=2" in "\n".join(explain._algorithm(config))


def test_options_of_a_flow_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "own_flow.py"
    body = GRPO + "    run.record(target=run.options.target)\n"
    file.write_text(OPTIONS + textwrap.indent(body.strip(), "    ") + "\n")
    config = following(config_of(tmp_path / "run"), f"{file}:mine")

    def given(**options: Any) -> RunConfig:
        return replace(config, algorithm=replace(config.algorithm, flow_options=options))

    assert checked(given(target=0.5)) == []
    for options, message in (
        ({"targt": 0.5}, "algorithm.flow_options.targt"),
        ({"target": "high"}, "algorithm.flow_options.target: got 'high'"),
    ):
        with pytest.raises(ConfigError, match=message):
            checked(given(**options))
    config = following(config_of(tmp_path / "run"), own(tmp_path, GRPO))
    (problem,) = problems(replace(config, algorithm=AlgorithmConfig(flow_options={"target": 1})))
    assert "algorithm.flow=None has no options" in problem
