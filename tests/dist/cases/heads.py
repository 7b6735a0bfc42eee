"""Multi-token-prediction heads: by DeepSeek's formula with transformers' own layers in float64, and
what they leave alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hybridflow.batch import DataProto
from hybridflow.config.schema import OptimConfig
from hybridflow.data.packing import RESPONSE_MASK
from tests import models
from tests.dist.cases.gradient import batch_with_columns, with_mask
from tests.dist.harness.exact import exact_layers
from tests.dist.harness.policies import policy_of, share_of, weights_of

COEF = 0.7
TEMPERATURE = 0.8
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "one process": ({}, 1),
    "TP2": ({"tensor": 2, "sequence": True}, 2),
    "PP2": ({"pipeline": 2}, 2),
    "CP2": ({"context": 2}, 2),
    "EP2": ({"expert": 2}, 2),
    "DP2": ({}, 2),
    "TP2 PP2 EP2": ({"tensor": 2, "sequence": True, "pipeline": 2, "expert": 2}, 4),
    "PP2 VPP2 CP2": ({"pipeline": 2, "virtual_pipeline": 2, "context": 2}, 4),
}


def hf_of(name: str, heads: int = 1) -> dict[str, Any]:
    """A tiny model of `tests.models`, by the name of its constant or, of those in `FAMILIES`, of
    its family."""
    hf = models.FAMILIES[name] if name.islower() else getattr(models, name)
    return hf if name.startswith("qwen") else {**hf, "num_nextn_predict_layers": heads}


def rows(policy: Any) -> DataProto:
    """Rows with the columns of a policy loss, some of whose tokens were not sampled; several
    micro-batches' worth."""
    return with_mask(batch_with_columns(policy), share=0.2)


def update(policy: Any, batch: DataProto, max_tokens: int = 40) -> Any:
    from hybridflow.config.schema import ActorConfig
    from hybridflow.workers.losses import PolicyLoss

    loss = PolicyLoss(ActorConfig())
    return policy.train_mini_batch(
        share_of(batch),
        loss,
        columns=loss.columns,
        max_tokens=max_tokens,
        temperature=TEMPERATURE,
        with_entropy=loss.with_entropy,
    )


# ---- against the formula


def against_the_formula(cases: list[list[Any]], folder: str) -> list[dict[str, Any]]:
    """On each rank: every case [model, number of heads, layout] in order; what was measured, on
    rank 0 of each world."""
    from tests.dist.harness.worlds import Worlds

    worlds = Worlds()
    found = []
    for number, (name, heads, layout) in enumerate(cases):
        parallel, world = LAYOUTS[layout]
        if worlds.mine(range(world)):
            with worlds.world(range(world)):
                result = _measure(hf_of(name, heads), parallel, Path(folder, str(number)))
            if worlds.rank == 0:
                found.append({"name": f"{name} with {heads} heads, {layout}", **result})
    worlds.finish()
    return found


def _measure(hf: dict[str, Any], parallel: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The largest differences of log-probs (with delta nets, also that of the formula in float32)
    and, in units of the largest one, of gradients."""
    from hybridflow.mcore.parallel import data_parallel_position
    from hybridflow.models.delta_net import has_delta_net

    policy = policy_of({**parallel, "distributed_optimizer": False}, hf, heads={"coef": COEF})
    policy.set_optimizer(OptimConfig(lr=1e-9, clip_grad=0.0))
    batch = rows(policy)
    recorded = _recorded(policy)
    metrics, _ = update(policy, batch)
    ours = _everyones(recorded)
    gradients = _gradients(policy)
    totals = torch.zeros(2, dtype=torch.float64)
    if data_parallel_position()[2]:
        totals += torch.tensor(metrics["actor/mtp/loss"], dtype=torch.float64)
    dist.all_reduce(totals)
    expected, oracle = None, {}
    if dist.get_rank() == 0:
        write(policy.family, hf, folder)
        expected, oracle = formula(policy.family, folder, batch, COEF)
        rounded = expected
        if has_delta_net(policy.family):
            rounded, _ = formula(policy.family, folder, batch, COEF, torch.float32)
    result = {}
    if expected is not None:
        sizes = [len(ours), len(expected)]
        result["targets"] = sizes if sizes[0] != sizes[1] else [0, 0]
        result["log_probs"] = float((ours - expected).abs().max()) if len(set(sizes)) == 1 else 1e9
        result["rounding"] = float((rounded - expected).abs().max())
        result["metric"] = abs(float(totals[0] / totals[1] + expected.mean()))
    scale = [max((float(tensor.abs().max()) for tensor in oracle.values()), default=0.0)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (oracle, scale[0]))
    oracle, largest = everyone[0]
    worst = torch.tensor(
        max((float((value.double() - oracle[n]).abs().max()) for n, value in gradients.items()),
            default=0.0)
    )  # fmt: skip
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    count = torch.tensor(len(gradients))
    dist.all_reduce(count)
    assert int(count) == len(oracle)
    return {**result, "gradient": float(worst) / largest}


def _recorded(policy: Any) -> list[torch.Tensor]:
    """The log-probs of the heads' targets as they are computed, on one tensor rank."""
    from megatron.core import parallel_state

    from hybridflow.mcore import head_training

    found: list[torch.Tensor] = []
    original = head_training.log_probs_and_entropy

    def record(*arguments: Any) -> Any:
        log_probs, entropy = original(*arguments)
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            found.append(log_probs.detach().double())
        return log_probs, entropy

    head_training.log_probs_and_entropy = record

    learn = policy.head_training.end

    def end() -> Any:
        head_training.log_probs_and_entropy = original
        return learn()

    policy.head_training.end = end
    return found


def _everyones(mine: list[torch.Tensor]) -> torch.Tensor:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, torch.cat(mine) if mine else torch.zeros(0))
    return torch.cat([one.double() for one in everyone]).sort().values


def _gradients(policy: Any) -> dict[str, torch.Tensor]:
    """The heads' reduced gradient as HF tensors, on the last stage's leader."""
    from hybridflow.mcore.parallel import all_coordinates
    from tests.dist.cases.gather import gather_stage, plan_stages

    ranks = all_coordinates()
    local = {
        name: getattr(parameter, "main_grad", torch.zeros_like(parameter))
        for name, (parameter, _) in policy.described.items()
    }
    found = {}
    for plan in plan_stages(policy.family, ranks, 1 << 20, 4):
        if plan.stage == ranks[dist.get_rank()].pp_rank:
            for tensors in gather_stage(plan, local, torch.float32):
                found |= tensors
    own = tensors_of_heads(policy.family)
    return {name: tensor for name, tensor in found.items() if name in own}


def tensors_of_heads(family: Any) -> set[str]:
    """The names of the heads' parameters in a checkpoint."""
    from hybridflow.models.family import kept_dtypes, without_prediction_heads

    own = family.tensors().keys() - without_prediction_heads(family).tensors().keys()
    return own - kept_dtypes(family).keys()  # biases of experts are buffers


def write(family: Any, hf: dict[str, Any], folder: Path, aliases: bool = False) -> None:
    """A published folder, with the copies of embedding and output layer that DeepSeek-V3's has."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    source = weights_of(family)
    tensors = {
        name: source.read(name, (0,) * len(shape), shape)
        for name, shape in family.tensors().items()
    }
    if aliases:
        tensors |= {alias: tensors[name].clone() for alias, name in family.aliases().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf))


def formula(
    family: Any, folder: Path, batch: DataProto, coef: float, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of all targets in ascending order, and the gradient of the heads' parameters, one
    row at a time.

    The layers are transformers', in a model that has those of the heads as further ones. The rest
    is equations 21 to 23 of arXiv 2412.19437.
    """
    from safetensors.torch import load_file

    from hybridflow.engines.hf.engine import checkpoint_tensors

    number, heads = family.num_layers, family.num_mtp
    names = [family.head_names(head) for head in range(heads)]
    prefixes = {f"model.layers.{number + k}.": one.layer for k, one in enumerate(names)}
    tensors = load_file(folder / "model.safetensors")
    more = folder.with_name(f"{folder.name}-{dtype}")
    model = _with_more_layers(family, tensors, prefixes, more, dtype)
    layers = model.model.layers
    model.model.layers = layers[:number]
    model.config.num_hidden_layers = number
    own = {
        f"{name}.weight": tensors[f"{name}.weight"].to(dtype).requires_grad_()
        for one in names
        for name in (*one.norms, one.projection)
    }
    predicted: list[list[torch.Tensor]] = [[] for _ in range(heads)]
    for row in range(len(batch)):
        prompt, response = batch["prompt_ids"].row(row), batch["response_ids"].row(row)
        mask = batch[RESPONSE_MASK].row(row)
        ids = torch.from_numpy(np.concatenate([prompt, response]))
        with torch.no_grad():
            states = model.model(ids[None], use_cache=False).last_hidden_state
        embedded = model.model.embed_tokens(ids)[None].detach()
        for depth, one in enumerate(names, 1):
            if len(ids) <= depth:
                break
            layer = layers[number + depth - 1]
            parts = [own[f"{name}.weight"] for name in (*one.norms, one.projection)]
            states = _head(model, family, layer, parts, states, embedded[:, depth:])
            logits = states[0] @ model.lm_head.weight.detach().T / TEMPERATURE
            log_probs = logits.log_softmax(-1)
            for first in range(len(response) - depth):
                if mask[first : first + depth + 1].all():
                    place = len(prompt) + first - 1
                    target = int(response[first + depth])
                    predicted[depth - 1].append(log_probs[place, target])
    loss = sum(-coef / heads * torch.stack(of_depth).mean() for of_depth in predicted)
    loss.backward()  # type: ignore[union-attr]
    model.model.layers = layers
    for parameter in layers[number:].parameters():
        parameter.data = parameter.grad
    found = {name: tensor.grad for name, tensor in own.items()}
    for name, tensor in checkpoint_tensors(model):
        for theirs, ours in prefixes.items():
            published = name.replace(theirs, ours)
            if name.startswith(theirs) and published in tensors_of_heads(family):
                found[published] = tensor
    return torch.cat([torch.stack(one) for one in predicted]).detach().sort().values, found


def _with_more_layers(
    family: Any,
    tensors: dict[str, torch.Tensor],
    prefixes: dict[str, str],
    folder: Path,
    dtype: torch.dtype,
) -> Any:
    """transformers' model with the layers of the heads after its own."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    renamed = dict(tensors)
    for theirs, ours in prefixes.items():
        for name in tensors:
            if ours != theirs and name.startswith(ours):
                renamed[name.replace(ours, theirs)] = renamed.pop(name)
    folder.mkdir()
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(family.hf))
    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = family.num_layers + len(prefixes)
    for kinds in ("layer_types", "mlp_layer_types"):
        if listed := getattr(config, kinds, None):
            setattr(config, kinds, [*listed, *listed[-1:] * len(prefixes)])
    model, loaded = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not loaded["missing_keys"], loaded
    return (exact_layers(model) if dtype == torch.float64 else model).eval()


def _head(
    model: Any,
    family: Any,
    layer: Any,
    parts: list[torch.Tensor],
    states: torch.Tensor,
    embedded: torch.Tensor,
) -> torch.Tensor:
    """h' = norm(layer(eh_proj [enorm(embedding of the next token); hnorm(h)]))."""
    enorm, hnorm, last, eh_proj = parts
    zero = 1.0 if family.megatron_config().get("layernorm_zero_centered_gamma") else 0.0

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).rsqrt()
        return x * scale * (weight + zero)

    states = states[:, : embedded.shape[1]]
    joined = torch.cat([norm(embedded, enorm), norm(states, hnorm)], -1) @ eh_proj.T
    length = joined.shape[1]
    positions = torch.arange(length)[None]
    causal = torch.full((length, length), -torch.inf, dtype=joined.dtype).triu(1)[None, None]
    output = layer(
        joined,
        attention_mask=causal,
        position_ids=positions,
        position_embeddings=model.model.rotary_emb(joined, positions),
    )
    return norm(output[0] if isinstance(output, tuple) else output, last)


# ---- what the policy sees of them


def compared(cases: list[list[Any]]) -> list[dict[str, Any]]:
    """On each rank: every case [model, layout, dtype, distributed optimizer]; what differs between
    a policy that trains heads and one without, of the policy's weights, reduced gradients, gradient
    norms and metrics after each of three updates."""
    from tests.dist.harness.worlds import Worlds

    worlds = Worlds()
    found = []
    for name, layout, dtype, distributed in cases:
        parallel, world = LAYOUTS[layout]
        if worlds.mine(range(world)):
            with worlds.world(range(world)):
                parallel = {**parallel, "distributed_optimizer": distributed}
                runs = [_trained(hf_of(name), parallel, dtype, heads) for heads in (None, {})]
            without, with_heads = runs
            differing = [key for key in without if without[key] != with_heads.get(key)]
            moved = [value for key, value in with_heads.items() if key.startswith("moved")]
            found.append(
                {"name": f"{name}, {layout}, {dtype}", "differing": differing, "moved": moved}
            )
    worlds.finish()
    return found


def _trained(
    hf: dict[str, Any], parallel: dict[str, Any], dtype: str, heads: dict[str, Any] | None
) -> dict[str, Any]:
    """Digests of everything the policy's update computes, bit by bit."""
    from hashlib import sha256

    policy = policy_of(parallel, hf, dtype=dtype, heads=heads, expert_bias_update_rate=0.01)
    # the norm is clipped, so that one that counted the heads would change every weight
    policy.set_optimizer(OptimConfig(lr=1e-2, clip_grad=0.1, adam_eps=1e-3))
    found: dict[str, Any] = {}

    def note(name: str, tensor: torch.Tensor) -> None:
        data = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        found[name] = sha256(data).hexdigest()

    before = _heads_of(policy)
    for step in range(3):
        metrics, facts = update(policy, rows(policy))
        for name, weight in policy.weights().items():
            note(f"{step} {name}", weight)
            if hasattr(weight, "main_grad"):
                note(f"{step} gradient of {name}", weight.main_grad)
        found |= {f"{step} {key}": value for key, value in facts.items()}
        found |= {f"{step} {key}": value for key, value in metrics.items() if "/mtp/" not in key}
        if heads is not None and metrics:
            assert {"actor/mtp/loss", "actor/mtp/accuracy"} <= metrics.keys()
            assert metrics["actor/mtp/skipped_updates"] == (0.0, 1.0)
    for name, weight in _heads_of(policy).items():
        if not name.endswith(("expert_bias", "word_embeddings.weight")):
            found[f"moved {name}"] = not torch.equal(weight, before[name])
    return found


def _heads_of(policy: Any) -> dict[str, torch.Tensor]:
    own = policy.weights()
    named = policy.described.items()
    return {name: tensor.detach().clone() for name, (tensor, _) in named if name not in own}


# ---- saved, resumed and exported


def save(layout: str, name: str, folder: str) -> dict[str, Any]:
    """Two updates, a checkpoint, an export next to the published folder, and two further
    updates."""
    from hybridflow.mcore import checkpoint, hf_export

    hf = hf_of(name)
    policy = resumable(layout, hf)
    published = Path(folder) / "published"
    if dist.get_rank() == 0:
        write(policy.family, hf, published, aliases=True)
    dist.barrier()
    for _ in range(2):
        update(policy, rows(policy))
    checkpoint.save(policy, Path(folder) / "checkpoint", phase="rl", step=2)
    hf_export.export(policy, Path(folder) / "export", hf, None, source=published)
    return state(policy)


def resume(layout: str, name: str, folder: str, without: bool = False) -> Any:
    """The state after loading, and after two further updates; or, without heads, what the load
    says."""
    from hybridflow.errors import CheckpointError
    from hybridflow.mcore import checkpoint

    policy = resumable(layout, hf_of(name), None if without else {})
    try:
        checkpoint.load(policy, Path(folder) / "checkpoint")
    except CheckpointError as error:
        return str(error)
    return state(policy)


def resumable(layout: str, hf: dict[str, Any], heads: dict[str, Any] | None = {}) -> Any:  # noqa: B006
    policy = policy_of(LAYOUTS[layout][0], hf, heads=heads)
    policy.set_optimizer(
        OptimConfig(lr=1e-2, lr_decay_style="linear", lr_decay_steps=9, adam_eps=1e-3)
    )
    return policy


def state(policy: Any) -> dict[str, Any]:
    """Every tensor now, the heads' counters, and every tensor and the heads' loss after two more
    updates."""
    from tests.dist.harness.policies import digest

    found = {"before": digest(policy), "facts": policy.head_training.facts()}
    losses = []
    for _ in range(2):
        metrics, facts = update(policy, rows(policy))
        losses.append([*metrics.get("actor/mtp/loss", ()), facts["grad_norm"], facts["lr"]])
    return {**found, "losses": losses, "after": digest(policy)}
