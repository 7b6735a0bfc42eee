"""The simulator, the links' bound, and `hybridflow reshard plan`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from hybridflow.cli.main import main
from hybridflow.models.layout import ParallelShape
from hybridflow.reshard.engine_layouts import EngineShape
from hybridflow.reshard.links import link_loads
from hybridflow.reshard.simulate import Fabric, simulate
from tests.models import FAMILIES
from tests.unit.reshard import reshard_cases as cases

# 10^6 bytes a second, memory for nothing
LINK = Fabric(link_gbps=8e-3, message_us=0.0, memory_gbs=1e9)


def test_one_to_one_takes_the_bytes_over_the_link() -> None:
    plan = cases.plan_of(cases.decoder_of("llama"), ParallelShape(1), (EngineShape(),))
    run = simulate(plan, LINK)
    assert run.seconds == pytest.approx(link_loads(plan).total / 1e6, rel=1e-6)
    assert run.wire_share == pytest.approx(1.0)


def test_one_sender_to_many_is_bound_by_the_sender() -> None:
    plan = cases.plan_of(cases.decoder_of("llama"), ParallelShape(1), (EngineShape(count=4),))
    run = simulate(plan, LINK)
    assert run.loads.bound == run.loads.egress.max() == 4 * run.loads.ingress.max()
    assert run.seconds == pytest.approx(run.wire_bound_s, rel=1e-6)


def test_each_message_costs() -> None:
    plan = cases.plan_of(
        cases.decoder_of("llama"), ParallelShape(1), (EngineShape(),), staging_bytes=1 << 17
    )
    free = simulate(plan, LINK)
    costly = simulate(plan, dataclasses.replace(LINK, message_us=1e6))
    assert costly.seconds == pytest.approx(free.seconds + free.messages, rel=1e-3)


def test_a_wrong_choice_of_senders_is_seen() -> None:
    plan = cases.plan_of(cases.decoder_of("llama"), ParallelShape(4), (EngineShape(count=4),))
    lazy = dataclasses.replace(
        plan, sends=dataclasses.replace(plan.sends, source=np.zeros_like(plan.sends.source))
    )
    assert simulate(lazy, LINK).seconds > 3 * simulate(plan, LINK).seconds
    assert link_loads(lazy).hottest > 3 * link_loads(lazy).bound
    assert link_loads(plan).hottest <= 1.05 * link_loads(plan).bound


ARGS = [
    "reshard",
    "plan",
    "--trainer",
    "ranks=4,tp=2,pp=2",
    "--engines",
    "2xtp=2",
    "--engines",
    "tp=1",
    "--staging-mib",
    "1",
    "--model",
]


def test_command_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["qwen3_moe"]))
    assert main([*ARGS, str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "4 trainer, 5 engine (3 engines)" in out
    assert "x the lower bound" in out


def test_command_prints_json_and_writes_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(FAMILIES["deepseek_v3"]))
    assert main([*ARGS, str(config), "--json", "--write", str(tmp_path / "plan.json")]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["hottest_link_ratio"] <= 1.05
    assert json.loads((tmp_path / "plan.json").read_text())["hash"] == figures["plan_hash"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "gpt-5"], "unknown model 'gpt-5'"),
        (["--trainer", "tp=2"], "ranks=NUMBER is missing; valid names: cp, ep"),
        (["--trainer", "ranks=4,dpa=2"], "'data_attention' is not a size that this option accepts"),
        (["--engines", "tp=two"], "'tp=two' in 'tp=two': expected NAME=NUMBER"),
        (["--engines", "tp=3"], "must be a multiple of"),
        (["--engines", "0xtp=8"], "must be 1 or more"),
        (["--link-gbps", "0"], "must be positive"),
        (["--staging-mib", "0"], "set the staging bytes to at least 32768"),
        (["--trainer", "ranks=6,tp=4"], "6 ranks are not a multiple of 4"),
    ],
)
def test_bad_input_is_one_clear_message(
    change: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "reshard",
                "plan",
                "--model",
                "llama-3.1-70b",
                "--trainer",
                "ranks=8,tp=8",
                "--engines",
                "tp=8",
                *change,
            ]
        )
        != 0
    )
    assert message in capsys.readouterr().err
