"""Speed metrics of a step, with verl's names and units: tokens per second per device, seconds, and
model FLOPs utilization (MFU).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.planning.devices import DEVICES, Machines
from hybridflow.planning.job import job_of
from hybridflow.planning.training import Training

# phases that verl divides by all tokens; `gen` is divided by response tokens
_OVER_ALL_TOKENS = ("ref", "values", "adv", "update_critic", "update_actor")


class Performance:
    """Computes the speed of each step.

    Attributes:
        devices: all devices of the run (processes on CPUs), including those of the engines.
        training: the policy's FLOP model (`Training.flops`); None on CPUs and on devices whose peak
            is unknown.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        cluster = config.cluster
        self.devices = cluster.nodes * (cluster.devices_per_node or cluster.procs_per_node)
        self.training: Training | None = None

    def use_model(self, hf_config: Mapping[str, Any], device_name: str) -> None:
        """Enable MFU reporting for this model if the device's peak is known. `device_name` is the
        name that the driver reports.
        """
        known = [name for name in DEVICES if name.upper() in device_name.upper().split()]
        if known:
            each = self.devices // self.config.cluster.nodes
            machines = Machines(known[0], DEVICES[known[0]], self.config.cluster.nodes, each)
            self.training = job_of(self.config, machines, hf=hf_config).roles[0].training

    def metrics(self, batch: DataProto, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a step.

        Args:
            batch: the step's samples.
            seconds: {timing_s/PHASE: seconds}.
        """
        responses = batch.lengths("response_ids").astype(np.float64)
        lengths = responses + batch.lengths("prompt_ids")
        step = max(seconds.get("timing_s/step", 0.0), 1e-9)
        counted = {"gen": responses.sum(), **dict.fromkeys(_OVER_ALL_TOKENS, lengths.sum())}
        found = {
            "perf/time_per_step": step,
            "perf/throughput": float(lengths.sum()) / step / self.devices,
            **{
                f"timing_per_token_ms/{phase}": seconds[f"timing_s/{phase}"] * 1000 / float(tokens)
                for phase, tokens in counted.items()
                if f"timing_s/{phase}" in seconds and tokens
            },
        }
        return found | self._mfu(lengths, seconds, step)

    def _mfu(
        self, lengths: np.ndarray, seconds: Mapping[str, float], step: float
    ) -> dict[str, float]:
        updating = seconds.get("timing_s/update_actor", 0.0)
        if self.training is None or not updating or not lengths.sum():
            return {}
        # a token attends to half of its sample on average, so long samples count for more
        mean = float((lengths**2).sum() / lengths.sum())
        passes = self.config.actor.ppo_epochs
        flops = self.training.flops(float(lengths.sum()), mean) * passes
        peak = self.training.device.peak(self.training.precision.fp8)
        ranks = derived.world_size(self.config)
        return {
            "perf/mfu/actor": flops / (updating * ranks * peak),
            "perf/mfu": flops / (step * self.devices * peak),
        }
