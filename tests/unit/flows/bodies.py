"""Flows in files of a user's own, for the tests of this folder."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path

from hybridflow.config.schema import AlgorithmConfig, RunConfig
from hybridflow.single_controller import block_on
from hybridflow.trainer.loop import RLTrainer

HEAD = """
from hybridflow.flows.base import flow

@flow("mine", roles={roles})
async def mine(run):
"""
GRPO = """
async for step in run.steps():
    batch = await run.samples()
    batch = await run.all(run.policy.log_probs(batch), run.reference.log_probs(batch))
    batch = run.advantages(batch)
    await run.policy.update(batch)
    await run.sync()
"""
BEGIN = """
async for step in run.steps():
    batch = await run.samples()
"""
FIRST = 6  # line of a body's first line


def own(folder: Path, body: str, roles: tuple[str, ...] = ("policy", "reference")) -> str:
    """The name of a flow in a file of its own."""
    file = folder / "own_flow.py"
    file.write_text(HEAD.format(roles=roles) + textwrap.indent(body.strip(), "    ") + "\n")
    return f"{file}:mine"


def following(config: RunConfig, name: str | None) -> RunConfig:
    return replace(config, algorithm=AlgorithmConfig(flow=name))


def fitted(trainer: RLTrainer) -> RLTrainer:
    block_on(trainer.start_from_present_weights())
    block_on(trainer.fit())
    return trainer
