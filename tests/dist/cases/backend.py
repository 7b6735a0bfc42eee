"""What each rank does in the contract suite of training backends: the same cases, whichever
backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import (
    ActorConfig,
    ClusterConfig,
    DistillationConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
)
from hybridflow.device.platform import Platform
from hybridflow.reshard.layout import Catalog
from tests.dist.cases.gradient import with_mask
from tests.dist.harness.policies import batch_of, weights_of

ROWS = 8
# a large epsilon: without it Adam turns rounding noise in a gradient near zero into a whole step of
# either sign
OPTIM = OptimConfig(
    lr=1e-2,
    min_lr=1e-3,
    lr_decay_style="cosine",
    lr_warmup_steps=2,
    lr_decay_steps=6,
    weight_decay=0.1,
    adam_beta2=0.95,
    adam_eps=1e-3,
    clip_grad=1.0,
)


def open_policy(
    backend: str,
    hf: dict[str, Any],
    std: float = 0.2,
    dtype: str = "float32",
    tensor: int = 1,
    recompute: str = "none",
    lora: dict[str, Any] | None = None,
) -> Any:
    """The backend as the worker opens it, over weights in which a dropped or swapped tensor
    shows."""
    from hybridflow.workers import backend as backends

    config = RunConfig(
        model=ModelConfig(hf_config=hf, dtype=dtype),
        actor=ActorConfig(
            backend=backend,
            parallel=ParallelConfig(tensor=tensor),
            recompute=recompute,  # type: ignore[arg-type]
            lora=LoraConfig(**lora) if lora else LoraConfig(),
        ),
        cluster=ClusterConfig(call_timeout_s=100),
    )
    initial = backends.initial_weights
    backends.initial_weights = lambda family, seed: weights_of(family, initial(family, seed).std)
    try:
        return backends.open_backend(config, hf, Platform("cpu"), 0)
    finally:
        backends.initial_weights = initial


def share(policy: Any, batch: DataProto) -> DataProto:
    rank, size, _ = policy.mesh_position()
    return batch.chunk(size)[rank]


def steps(policy: Any, numbers: range, max_tokens: int = 40) -> list[list[float]]:
    """(loss sum, count, grad norm, rate) a step; loss and count of this rank."""
    from hybridflow.workers.losses import sft_loss

    history = []
    for step in numbers:
        metrics, info = policy.train_mini_batch(
            share(policy, batch_of(ROWS, step)),
            sft_loss,
            columns=(),
            max_tokens=max_tokens,
            temperature=1.0,
            with_entropy=False,
        )
        history.append([*metrics["loss"], info["grad_norm"], info["lr"]])
    return history


def whole(policy: Any) -> dict[str, torch.Tensor]:
    """All HF tensors, put together from what every rank's layout says it holds."""
    layout = policy.weight_layout()(Catalog.of(policy.family.tensors()))
    tensors = policy.family.tensors()
    found = {name: torch.zeros(shape) for name, shape in tensors.items()}
    counts = {name: torch.zeros(shape) for name, shape in tensors.items()}
    mine = layout.classes[int(layout.rank_class[dist.get_rank()])]
    names = list(tensors)
    parameters = policy.parameters()
    for tensor, start, size, buffer, local in zip(
        mine.tensor, mine.start, mine.size, mine.buffer, mine.local, strict=True
    ):
        dims = len(tensors[names[tensor]])
        there, here = (
            tuple(slice(a, a + n) for a, n in zip(at[-dims:], size[-dims:], strict=True))
            for at in (start, local)
        )
        found[names[tensor]][there] = parameters[mine.names[buffer]][here].float()
        counts[names[tensor]][there] = 1
    for name in tensors:
        dist.all_reduce(found[name])
        dist.all_reduce(counts[name])
        found[name] /= counts[name]  # not covered: NaN
    return found


def digest(tensors: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    return {
        name: [float(t.double().sum()), float(t.double().square().sum())]
        for name, t in tensors.items()
    }


def contract(
    backend: str, hf: dict[str, Any], folder: str, lora: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One life of a policy: score, export, train, save, go on; then back from the checkpoint and
    the same steps again."""
    policy = open_policy(backend, hf, lora=lora)
    at = Path(folder)
    scored = policy.log_probs(
        share(policy, batch_of(12, 3)), max_tokens=30, temperature=0.7, with_entropy=True
    )
    policy.export(at / "before", hf, None)
    policy.freeze_reference()
    policy.set_optimizer(OPTIM)
    result: dict[str, Any] = {
        "backend": policy.describe()["backend"],
        "log_probs": scored[0].values.tolist(),
        "entropy": scored[1].values.tolist(),
        "history": steps(policy, range(3)),
        "weights": digest(whole(policy)),
    }
    with policy.as_reference():
        found = policy.log_probs(
            share(policy, batch_of(12, 3)), max_tokens=4096, temperature=0.7, with_entropy=False
        )
    result["reference"] = found[0].values.tolist()
    policy.export(at / "trained", hf, None)
    saver = policy.saver(60.0)
    saver.start(at / "checkpoint", phase="rl", step=3)
    result["more"] = steps(policy, range(3, 5))
    saver.wait(60.0)
    end = whole(policy)
    policy.load(at / "checkpoint")
    result["again"] = steps(policy, range(3, 5))
    again = whole(policy)
    result["resumed"] = all(torch.equal(end[name], again[name]) for name in end)
    return result | {"end": digest(end), "misfits": misfits(policy, hf, at)}


def recomputed(
    backend: str, hf: dict[str, Any], lora: dict[str, Any] | None = None
) -> dict[str, Any]:
    """By `actor.recompute`: three updates, and the passes through the first layer's MLP that one of
    them and one scoring take."""
    found: dict[str, Any] = {}
    for recompute in ("none", "full"):
        policy = open_policy(backend, hf, recompute=recompute, lora=lora)
        policy.set_optimizer(OPTIM)
        passes: list[int] = []
        mlp = policy.model.causal.model.layers[0].mlp
        hook = mlp.register_forward_pre_hook(lambda *_, seen=passes: seen.append(1))
        history = steps(policy, range(1), max_tokens=4096)
        trained = len(passes)
        rows = share(policy, batch_of(12, 3))
        policy.log_probs(rows, max_tokens=4096, temperature=1.0, with_entropy=False)
        hook.remove()
        history += steps(policy, range(1, 3))
        found[recompute] = {
            "history": history,
            "passes": [trained, len(passes) - trained],
            "end": digest(whole(policy)),
        }
    return found


def teacher_of(rows: DataProto, vocab: int, k: int) -> DataProto:
    """`rows` with the k most likely tokens of a teacher drawn at random, each with its log-prob."""
    responses = rows.jagged("response_ids")
    rng = np.random.default_rng(9)
    whole = torch.from_numpy(rng.normal(0, 2, (len(responses.values), vocab))).log_softmax(-1)
    best = whole.topk(k, dim=-1)
    return rows.with_columns(
        teacher_top_log_probs=Jagged(best.values.numpy().astype(np.float32), responses.offsets),
        teacher_top_ids=Jagged(best.indices.numpy(), responses.offsets),
        **{
            name: Jagged(np.zeros(len(responses.values), np.float32), responses.offsets)
            for name in ZEROS
        },
    )


ZEROS = ("old_log_probs", "advantages")


def distilled(backend: str, hf: dict[str, Any], folder: str, tensor: int) -> dict[str, Any]:
    """One update by `forward_kl_topk`, observations among its tokens, after an export: its loss,
    count and norm."""
    from hybridflow.workers.losses import PolicyLoss

    policy = open_policy(backend, hf, tensor=tensor)
    policy.export(Path(folder), hf, None)
    policy.set_optimizer(OPTIM)
    loss = PolicyLoss(ActorConfig(distillation=DistillationConfig(coef=1.0, task_rewards=False)))
    batch = with_mask(teacher_of(batch_of(12, 3), hf["vocab_size"], 5))
    sums, info = policy.train_mini_batch(
        share(policy, batch),
        loss,
        columns=loss.columns,
        max_tokens=30,
        temperature=0.7,
        with_entropy=False,
    )
    return {"sums": sums["actor/distillation_loss"], "norm": info["grad_norm"]}


def misfits(policy: Any, hf: dict[str, Any], at: Path) -> dict[str, str]:
    """What loading says that must be refused."""
    from hybridflow.errors import CheckpointError

    said = {}
    family, policy.family.hf = policy.family.hf, {**hf, "rms_norm_eps": 1e-5}
    for name in ("checkpoint", "nothing"):
        try:
            policy.load(at / name)
        except CheckpointError as error:
            said[name] = str(error)
    policy.family.hf = family
    return said


def resumed(
    backend: str,
    hf: dict[str, Any],
    folder: str,
    foreign: str,
    lora: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A new world, of whatever size, from the checkpoint that `contract` left; and what it says to
    another backend's."""
    from hybridflow.errors import CheckpointError

    policy = open_policy(backend, hf, 0.1, lora=lora)
    policy.set_optimizer(OPTIM)
    policy.freeze_reference()
    try:
        policy.load(Path(foreign) / "checkpoint")
        said = ""
    except CheckpointError as error:
        said = str(error)
    policy.load(Path(folder) / "checkpoint")
    history = steps(policy, range(3, 5))
    found = {"history": history, "end": digest(whole(policy)), "said": said}
    with policy.as_reference():
        scored = policy.log_probs(
            share(policy, batch_of(12, 3)), max_tokens=4096, temperature=0.7, with_entropy=False
        )
    return found | {"reference": scored[0].values.tolist()}


def held(backend: str, hf: dict[str, Any], folder: str) -> None:
    """Write the live parameters that this rank sends from, by the names of its layout."""
    policy = open_policy(backend, hf)
    np.savez(
        Path(folder) / f"rank{dist.get_rank()}.npz",
        **{name: tensor.numpy() for name, tensor in policy.parameters().items()},
    )
    policy.export(Path(folder) / "hf", hf, None)


def updates(backend: str, hf: dict[str, Any]) -> dict[str, Any]:
    """Other packings and orders of one batch; a NaN; weights off the device and back; more work on
    one rank than on the other."""
    policy = open_policy(backend, hf, 0.05)
    result = {"masked": masked(policy), **packings(policy)} | {
        "poisoned": poisoned(policy),
        "memory": slept(policy),
    }
    rows = [1, 12][dist.get_rank()]
    found = policy.log_probs(batch_of(rows, 3), max_tokens=20, temperature=1.0, with_entropy=False)
    return result | {"unequal": [rows, len(found[0])]}


def with_columns() -> DataProto:
    """Twelve rows with what the policy loss reads."""
    rng = np.random.default_rng(0)
    batch = batch_of(12, 5)
    lengths = batch["response_ids"].lengths
    columns = {
        name: Jagged.from_rows(
            [rng.normal(middle, 0.5, n).astype(np.float32) for n in lengths], np.float32
        )
        for name, middle in (("old_log_probs", -3.9), ("ref_log_probs", -3.9), ("advantages", 0.0))
    }
    return batch.with_columns(**columns)


def packings(policy: Any) -> dict[str, float]:
    """Largest relative difference of gradient norm, and of the weights after one step, from one
    micro-batch a rank; and the gradient norm of a sum over tokens in units of that of the mean and
    the number of tokens."""
    from hybridflow.workers.losses import PolicyLoss

    loss = PolicyLoss(
        ActorConfig(loss_agg_mode="seq-mean-token-mean", entropy_coef=0.1, kl_loss_coef=0.5)
    )
    batch = with_columns()
    before = whole(policy)
    found = []
    policy.freeze_reference()
    for max_tokens, order in ((4096, 1), (20, 1), (33, -1)):
        policy.set_optimizer(OptimConfig(lr=1e-3, adam_eps=1e-3, weight_decay=0.0, clip_grad=0.0))
        rows = share(policy, batch.reorder(np.arange(12)[::order]))
        _, info = policy.train_mini_batch(
            rows,
            loss,
            columns=loss.columns,
            max_tokens=max_tokens,
            temperature=0.8,
            with_entropy=True,
        )
        found.append((info["grad_norm"], whole(policy)))
        with torch.no_grad():  # back to the first weights
            for name, tensor in policy.parameters().items():
                tensor.copy_(policy.reference_state()[name])
    norms = []
    for mode in ("token-mean", "token-sum"):
        policy.set_optimizer(OptimConfig(lr=0.0, clip_grad=0.0))
        config: Any = {"loss_agg_mode": mode, "kl_loss_coef": 0.5}
        rows = share(policy, batch)
        loss = PolicyLoss(ActorConfig(**config))
        _, info = policy.train_mini_batch(
            rows, loss, columns=loss.columns, max_tokens=20, temperature=0.8, with_entropy=False
        )
        norms.append(info["grad_norm"])
    norm, one = found[0]
    others = found[1:]
    return {
        "norm": max(abs(other / norm - 1) for other, _ in others),
        "weights": max(
            float((two[name] - one[name]).abs().max()) for _, two in others for name in one
        ),
        "moved": max(float((one[name] - before[name]).abs().max()) for name in one),
        "sum": norms[1] / norms[0] / int(batch.lengths("response_ids").sum()),
    }


def masked(policy: Any) -> dict[str, Any]:
    """Updates with observations, at which every column is NaN, in two packings; and of a mask that
    is all true."""
    from hybridflow.workers.losses import PolicyLoss

    loss = PolicyLoss(ActorConfig(kl_loss_coef=0.5))
    batch = with_mask(with_columns())
    found: dict[str, Any] = {}
    whole_mask = with_mask(with_columns(), share=0.0)
    for name, rows, max_tokens in (
        ("one", batch, 4096),
        ("many", batch, 20),
        ("true", whole_mask, 4096),
        ("none", whole_mask.drop(["response_mask"]), 4096),
    ):
        policy.set_optimizer(OptimConfig(lr=0.0, weight_decay=0.0, clip_grad=0.0))
        arguments = {
            "columns": loss.columns,
            "max_tokens": max_tokens,
            "temperature": 0.8,
            "with_entropy": False,
        }
        sums, info = policy.train_mini_batch(share(policy, rows), loss, **arguments)
        found[name] = [info["grad_norm"], *(number for pair in sums.values() for number in pair)]
    return found


def own_values(backend: str, hf: dict[str, Any]) -> dict[str, Any]:
    """Norm, metrics and noted log-probs of a first update that compares with a pass before it, and
    with itself."""
    from hybridflow.workers.losses import Noted, PolicyLoss

    policy = open_policy(backend, hf, 0.1)
    rows = share(policy, with_columns()).drop(["old_log_probs"])
    arguments = {"max_tokens": 40, "temperature": 0.8, "with_entropy": True}
    before, entropies = policy.log_probs(rows, **arguments)
    found: dict[str, Any] = {
        "pass": before.values.tolist(),
        "pass_entropies": entropies.values.tolist(),
    }
    for name, batch, old in (
        ("scored", rows.with_columns(old_log_probs=before), "old_log_probs"),
        ("own", rows, None),
    ):
        policy.set_optimizer(OptimConfig(lr=0.0, weight_decay=0.0, clip_grad=0.0))
        loss = PolicyLoss(ActorConfig(entropy_coef=0.1), old)
        noted = Noted(loss)
        sums, info = policy.train_mini_batch(batch, noted, columns=loss.columns, **arguments)
        seen = noted.take(batch)
        assert seen is not None
        found[name] = {"norm": info["grad_norm"], "sums": sums}
        found[name] |= {column: seen.jagged(column).values.tolist() for column in seen.columns}
    return found


def drawn(backend: str, hf: dict[str, Any]) -> list[float]:
    """Gradient norms of two epochs of four updates each, drawn as `trainer.groups` draws them, and
    a weight sum."""
    from hybridflow.data.packing import update_order
    from hybridflow.workers.losses import PolicyLoss

    policy = open_policy(backend, hf, 0.1)
    loss = PolicyLoss(ActorConfig())
    batch = with_columns()
    found = []
    policy.set_optimizer(OPTIM)
    _, size, _ = policy.mesh_position()
    costs = batch.lengths("prompt_ids") + batch.lengths("response_ids")
    for epoch in range(2):
        rows = share(policy, batch.reorder(update_order(costs, size, 4, (7, epoch))))
        for mini_batch in rows.split(4 // size):
            arguments = {
                "columns": loss.columns,
                "max_tokens": 40,
                "temperature": 1.0,
                "with_entropy": False,
            }
            found.append(policy.train_mini_batch(mini_batch, loss, **arguments)[1]["grad_norm"])
    return [*found, *(value for pair in digest(whole(policy)).values() for value in pair)]


def poisoned(policy: Any) -> dict[str, Any]:
    """A loss that is NaN on rank 1 in its second micro-batch."""
    from hybridflow.errors import NonFiniteError
    from hybridflow.workers.losses import sft_loss

    seen: list[int] = []

    def loss(log_probs: torch.Tensor, entropy: Any, micro: Any) -> Any:
        seen.append(1)
        total, count, metrics = sft_loss(log_probs, entropy, micro)
        return (
            total * (torch.nan if dist.get_rank() == 1 and len(seen) == 2 else 1.0),
            count,
            metrics,
        )

    before = whole(policy)
    said = ""
    try:
        policy.train_mini_batch(
            share(policy, batch_of(ROWS, 0)),
            loss,
            columns=(),
            max_tokens=20,
            temperature=1.0,
            with_entropy=False,
        )
    except NonFiniteError as error:
        said = str(error)
    after = whole(policy)
    return {
        "said": said,
        "unchanged": all(torch.equal(before[name], after[name]) for name in before),
    }


def slept(policy: Any) -> dict[str, Any]:
    """Everything leaves and comes back."""
    from hybridflow.device.residency import PARTS, Residency

    residency = Residency(policy.memory_parts(), Platform("cpu"), policy.settle)
    batch = share(policy, batch_of(12, 3))
    scores = []
    held = residency.resident_bytes()
    scores.append(
        policy.log_probs(batch, max_tokens=64, temperature=1.0, with_entropy=False)[
            0
        ].values.tolist()
    )
    freed = residency.sleep(*PARTS)
    left = residency.resident_bytes()
    residency.wake(*PARTS)
    scores.append(
        policy.log_probs(batch, max_tokens=64, temperature=1.0, with_entropy=False)[
            0
        ].values.tolist()
    )
    return {"equal": scores[0] == scores[1], "held": dict(held), "freed": freed, "left": dict(left)}


def low_precision(backend: str, hf: dict[str, Any], folder: str) -> dict[str, Any]:
    """bf16: log-probs, losses of a repeated batch, and the folder written at the end."""
    from hybridflow.workers.losses import sft_loss

    policy = open_policy(backend, hf, 0.05, dtype="bfloat16")
    batch = share(policy, batch_of(ROWS, 0))
    scored = policy.log_probs(batch, max_tokens=40, temperature=1.0, with_entropy=False)
    policy.export(Path(folder), hf, None)
    policy.set_optimizer(OptimConfig(lr=3e-3))
    losses = []
    for _ in range(6):
        metrics, _ = policy.train_mini_batch(
            batch, sft_loss, columns=(), max_tokens=40, temperature=1.0, with_entropy=False
        )
        losses.append(metrics["loss"][0])
    return {
        "log_probs": scored[0].values.tolist(),
        "losses": losses,
        "dtypes": sorted({str(t.dtype) for t in policy.parameters().values()}),
    }
