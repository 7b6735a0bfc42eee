"""What each rank does in the tests of router replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridflow.batch import FREE, ROUTES, DataProto, Jagged, read_parquet
from hybridflow.config.derived import num_experts
from hybridflow.config.schema import OptimConfig
from tests.dist.harness.policies import batch_of, digest, policy_of, share_of

OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, adam_beta2=0.95, adam_eps=1e-3)


def with_random_routes(batch: DataProto, hf: dict[str, Any], seed: int = 11) -> DataProto:
    """Routes that no router would choose; the last token of each sample is free."""
    rng = np.random.default_rng(seed)
    experts = num_experts(hf)
    rows = []
    for tokens in (batch.lengths("prompt_ids") + batch.lengths("response_ids")).tolist():
        shape = (tokens, hf["num_hidden_layers"], experts)
        row = rng.random(shape).argsort(-1)[..., : hf["num_experts_per_tok"]].astype(np.int16)
        row[-1] = FREE
        rows.append(row)
    return batch.with_columns(**{ROUTES: Jagged.from_rows(rows, np.int16)})


def _log_probs(policy: Any, batch: DataProto, max_tokens: int) -> np.ndarray | None:
    found = policy.log_probs(batch, max_tokens=max_tokens, temperature=1.0, with_entropy=False)
    return None if found is None else found[0].values


def _train(policy: Any, batch: DataProto, max_tokens: int) -> float:
    from hybridflow.workers.losses import sft_loss

    _, info = policy.train_mini_batch(
        batch, sft_loss, columns=(), max_tokens=max_tokens, temperature=1.0, with_entropy=False
    )
    return float(info["grad_norm"])


def _gradient(policy: Any, batch: DataProto, max_tokens: int) -> torch.Tensor:
    """This rank's gradient buffers after one backward; the weights stay."""
    policy.optimizer.inner.step, step = lambda: (True, 0.0, None), policy.optimizer.inner.step
    try:
        _train(policy, batch, max_tokens)
    finally:
        policy.optimizer.inner.step = step
    buffers = [
        buffer
        for chunk in policy.chunks
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]
    return torch.cat([buffer.grad_data for buffer in buffers]).clone()


def _set_recompute(policy: Any, kind: str) -> None:
    for stage in policy.stages:
        _set_recompute_of(stage, kind)


def _set_recompute_of(stage: Any, kind: str) -> None:
    config = stage.config
    config.recompute_granularity = "full" if kind == "full" else None
    config.recompute_method, config.recompute_num_layers = (
        ("uniform", 1) if kind == "full" else (None, None)
    )
    for module in stage.modules():
        if hasattr(module, "moe_layer_recompute"):
            module.moe_layer_recompute = kind == "moe"


def replayed(parallel: dict[str, Any], hf: dict[str, Any], max_tokens: int) -> Any:
    """Log-probs, routes and training under given routes, and the gradients of the same batch along
    several ways."""
    policy = policy_of(parallel, hf)
    policy.set_optimizer(OPTIM)
    plain = share_of(batch_of(12, 3))
    batch = share_of(with_random_routes(batch_of(12, 3), hf))
    replay = policy.replay
    result: dict[str, Any] = {"free": _log_probs(policy, batch, max_tokens)}
    with replay.during("replay"):
        result["given"] = _log_probs(policy, batch, max_tokens)
    result["counts"] = dict(replay.take_counts())
    with replay.during("compare"):
        compared = _log_probs(policy, batch, max_tokens)
    result["compared_counts"] = dict(replay.take_counts())
    with replay.during("record"):
        recorded_free = _log_probs(policy, plain, max_tokens)
        own = replay.recorded()
    replay.take_counts()
    with replay.during("replay"):
        result["own"] = _log_probs(policy, plain.with_columns(**{ROUTES: own}), max_tokens)
    result["own_counts"] = dict(replay.take_counts())
    result["recorded"] = own.values.tolist()
    if result["free"] is not None:
        np.testing.assert_array_equal(compared, result["free"])
        np.testing.assert_array_equal(recorded_free, result["free"])
    result["gradients"] = _gradients(policy, plain.with_columns(**{ROUTES: own}), batch, max_tokens)
    with replay.during("replay"):
        result["norms"] = [
            _train(policy, share_of(with_random_routes(batch_of(8, step), hf, step)), max_tokens)
            for step in range(2)
        ]
    replay.take_counts()
    result["digest"] = digest(policy)
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in result.items()
    }


def _gradients(policy: Any, own: DataProto, other: DataProto, max_tokens: int) -> dict[str, float]:
    """Largest differences of this rank's gradient, relative to its largest entry: along its own
    routes against free routing, and under recomputation against without, along other routes."""
    replay = policy.replay
    free = _gradient(policy, own, max_tokens)
    with replay.during("replay"):
        along_own = _gradient(policy, own, max_tokens)
        given = _gradient(policy, other, max_tokens)
    found = {
        "own": float((along_own - free).abs().max() / free.abs().max()),
        "other": float((given - free).abs().max() / free.abs().max()),
    }
    for kind in ("full", "moe"):
        _set_recompute(policy, kind)
        with replay.during("replay"):
            again = _gradient(policy, other, max_tokens)
        found[kind] = float((again - given).abs().max() / given.abs().max())
    _set_recompute(policy, "none")
    replay.take_counts()
    return found


def broken(parallel: dict[str, Any], hf: dict[str, Any]) -> Any:
    """What is said when a router does not do what it is told, and when routes do not fit."""
    from hybridflow.errors import HybridFlowError

    policy = policy_of(parallel, hf)
    batch = with_random_routes(batch_of(4, 3), hf)
    said = {}

    def attempt(name: str, batch: DataProto, asks: bool = True) -> None:
        try:
            with policy.replay.during("replay"):
                if not asks:  # as an upgrade of Megatron that no longer asks
                    router.router_replay = None
                _log_probs(policy, batch, 4096)
            said[name] = "nothing"
        except HybridFlowError as error:
            said[name] = f"{type(error).__name__}: {error}"

    router = next(
        (module for module in policy.stages[0].modules() if hasattr(module, "router_replay")), None
    )
    attempt("fine", batch)
    if router is None:
        return said
    attempt("no column", batch.drop([ROUTES]))
    routes = batch.jagged(ROUTES)
    attempt(
        "other layers", batch.with_columns(**{ROUTES: Jagged(routes.values[:, 1:], routes.offsets)})
    )
    attempt(
        "other expert",
        batch.with_columns(
            **{ROUTES: Jagged(np.where(routes.values == 3, 7, routes.values), routes.offsets)}
        ),
    )
    lengths = np.array(routes.lengths)
    lengths[0], lengths[1] = lengths[0] - 1, lengths[1] + 1
    attempt(
        "other lengths", batch.with_columns(**{ROUTES: Jagged.from_lengths(routes.values, lengths)})
    )
    attempt(
        "twice",
        batch.with_columns(**{ROUTES: Jagged(np.zeros_like(routes.values), routes.offsets)}),
    )
    attempt("not asked", batch, asks=False)
    assert router.router_replay is None
    assert not router._forward_hooks
    assert not router._forward_pre_hooks
    attempt("fine again", batch)
    return said


def along_engine_routes(hf: dict[str, Any], folder: str, engine: str) -> Any:
    """Log-probs of an engine's samples under slightly other weights, with and without its routes;
    and this router's own choices."""
    from hybridflow.config.schema import ParallelConfig
    from hybridflow.mcore import parallel as groups
    from hybridflow.mcore.policy import Policy
    from hybridflow.models import family_of
    from hybridflow.models.weights import SafetensorsFolder

    class Rounded(SafetensorsFolder):
        """The weights as bfloat16 would hold them."""

        def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
            return super().read(name, start, shape).bfloat16().float()

    groups.initialize(ParallelConfig(), seed=1, backend="gloo", timeout_s=180)
    result: dict[str, Any] = {}
    batch = read_parquet(Path(engine))
    for name, source in (("same", SafetensorsFolder), ("rounded", Rounded)):
        policy = Policy(family_of(hf), ParallelConfig(), "float32", source(folder))
        with policy.replay.during("compare"):
            free = _log_probs(policy, batch, 4096)
        differing = policy.replay.take_counts()
        with policy.replay.during("replay"):
            along = _log_probs(policy, batch, 4096)
        assert free is not None and along is not None
        of_engine = batch.jagged("rollout_log_probs").values
        result[name] = {
            "free": np.abs(free - of_engine).tolist(),
            "along": np.abs(along - of_engine).tolist(),
            "differing": differing["differing"],
            "compared": differing["sent"],
        }
    return result
