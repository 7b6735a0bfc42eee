"""An Adam on the CPU that holds its state as Transformer Engine's FusedAdam documents it, and a
Megatron that uses it.

Main weights and moments are in their own precisions; those in float16 have a scale for each tensor;
steps are counted in the group; gradients are `decoupled_grad`; `get_unscaled_state` gives float32,
a copy wherever the state is not.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

NAMES = ("exp_avg", "exp_avg_sq", "master_param")
FLOAT16_RANGE = torch.finfo(torch.float16).max / 2


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        capturable: bool = False,
    ) -> None:
        assert (
            adam_w_mode
            and master_weights
            and use_decoupled_grad
            and not (store_param_remainders or capturable)
        )
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.dtypes = dict(
            zip(NAMES, (exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype), strict=True)
        )
        self.scales: dict[Any, dict[str, torch.Tensor]] = {}

    def initialize_state(self, param: Any, store_param_remainders: bool) -> None:
        assert not store_param_remainders
        for name, dtype in self.dtypes.items():
            self.state[param][name] = torch.zeros(param.shape, dtype=dtype)
            self.scales.setdefault(param, {})[name] = torch.ones(1)
        self.set_scaled_state(param, "master_param", param.detach().float())

    def get_unscaled_state(self, param: Any, name: str) -> torch.Tensor:
        held: torch.Tensor = self.state[param][name]
        if held.dtype is torch.float16:
            return held.float() * self.scales[param][name]
        return held.float()

    def set_scaled_state(self, param: Any, name: str, value: torch.Tensor) -> None:
        assert value.dtype is torch.float32
        held = self.state[param][name]
        if held.dtype is torch.float16:
            scale = (value.abs().max() / FLOAT16_RANGE).reshape(1)
            self.scales[param][name] = scale
            value = value / scale.clamp(min=torch.finfo(torch.float32).tiny)
        held.copy_(value)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                self._update(param, group)

    @torch.no_grad()
    def _update(self, param: Any, group: dict[str, Any]) -> None:
        if not self.state[param]:
            self.initialize_state(param, False)
        main, first, second = (
            self.get_unscaled_state(param, n) for n in ("master_param", "exp_avg", "exp_avg_sq")
        )
        grad = param.decoupled_grad.float()
        beta1, beta2 = group["betas"]
        step = group["step"]
        first = torch.lerp(first, grad, 1 - beta1)
        second = torch.lerp(second, grad * grad, 1 - beta2)
        ahead = first / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + group["eps"])
        main = main - group["lr"] * (ahead + group["weight_decay"] * main)
        for name, value in zip(
            ("master_param", "exp_avg", "exp_avg_sq"), (main, first, second), strict=True
        ):
            self.set_scaled_state(param, name, value)
        param.copy_(main)


def install() -> None:
    """Have Megatron build this Adam, and this project take Transformer Engine for installed, in
    this process."""
    import megatron.core.optimizer as optimizers
    from megatron.core.optimizer import distrib_optimizer

    from hybridflow.mcore import optimizer

    for name in (
        "transformer_engine",
        "transformer_engine.pytorch",
        "transformer_engine.pytorch.optimizers",
    ):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["transformer_engine.pytorch.optimizers"].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    sys.modules["transformer_engine"].__version__ = "2.10.0"  # type: ignore[attr-defined]
    changes = {"Adam": FusedAdam, "USING_PYTORCH_OPTIMIZER": False}
    for key, value in changes.items():
        setattr(optimizers, key, value)
    changes = {"Adam": FusedAdam, "HAVE_APEX_OR_TE": True, "USING_TE_OPTIMIZER": True}
    for key, value in changes.items():
        setattr(distrib_optimizer, key, value)
    optimizer.bootstrap = types.SimpleNamespace(HAVE_TRANSFORMER_ENGINE=True)  # type: ignore[assignment]
