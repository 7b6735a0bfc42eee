"""What each rank does in the tests of policies that share one base."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.config.schema import OptimConfig
from tests.dist.cases.lora import STD, factors
from tests.dist.cases.parity import MODELS, Case, _log_probs
from tests.dist.harness.policies import batch_of, policy_of, share_of

NAMES = ("policy", "tester")
# (adapters, optimizer) of each policy
_EXPERTS = ("linear_qkv", "experts.linear_fc1", "experts.linear_fc2")
LORA: dict[str, list[dict[str, Any]]] = {
    "dense": [{"rank": 4, "alpha": 6.0}, {"rank": 2, "targets": ("linear_qkv", "linear_fc2")}],
    "moe": [{"rank": 4, "alpha": 6.0, "targets": _EXPERTS}, {"rank": 2}],
    "deepseek": [{"rank": 4, "alpha": 6.0}, {"rank": 4, "alpha": 3.0}],
}
OPTIM = (
    OptimConfig(
        lr=1e-2, weight_decay=0.1, clip_grad=1.0, lr_decay_style="cosine", lr_decay_steps=6
    ),
    OptimConfig(lr=4e-3, adam_beta2=0.9, clip_grad=0.1, lr_warmup_steps=2),
)
STEPS = 3


def _cases() -> Iterator[Case]:
    tp2 = {"tensor": 2}
    sp = {"tensor": 2, "sequence": True}
    pp2 = {"pipeline": 2}
    both = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    yield Case("dense one process", "dense", quick=True)
    yield Case("dense TP2", "dense", tp2, quick=True)
    yield Case("dense DP2 distributed optimizer", "dense", {}, 2, quick=True)
    yield Case("dense PP2", "dense", pp2)
    yield Case("dense DP2", "dense", {"distributed_optimizer": False}, 2)
    yield Case("dense TP2 SP DP2 overlap", "dense", {**sp, **both}, 2)
    yield Case("dense PP2 VPP2 CP2", "dense", {**pp2, "virtual_pipeline": 2, "context": 2})
    yield Case("dense TP2 SP full recompute", "dense", sp, options={"recompute": "full"})
    yield Case("moe one process", "moe")
    yield Case("moe TP2 SP PP2 EP2", "moe", {**sp, **pp2, "expert": 2})
    yield Case("deepseek TP2 SP PP2 EP2", "deepseek", {**sp, **pp2, "expert": 2})


CASES = {case.name: case for case in _cases()}


def run_cases(names: list[str], folder: str) -> list[dict[str, Any]]:
    """Every case in order, on the ranks of each. Returns the results of this rank's."""
    from tests.dist.harness.worlds import measured

    cases = [CASES[name] for name in names]
    return measured(cases, lambda case: measure(case, Path(folder) / case.name), everywhere=True)


def pair_of(case: Case, shares: bool) -> list[Any]:
    """Both policies, the second one on the base of the first one, or on a copy."""
    hf = MODELS[case.model]
    pair: list[Any] = []
    for lora in LORA[case.model]:
        base = {"base": pair[0]} if shares and pair else {}
        pair.append(policy_of(case.parallel, hf, STD, lora=lora, **case.options, **base))
    for policy, optim in zip(pair, OPTIM, strict=True):
        policy.set_optimizer(optim)
    return pair


def step(policy: Any, seed: int) -> list[float]:
    """One update: loss, gradient norm and rate."""
    from hybridflow.workers.losses import sft_loss

    sums, info = policy.train_mini_batch(
        share_of(batch_of(8, seed)),
        sft_loss,
        columns=(),
        max_tokens=40,
        temperature=1.0,
        with_entropy=True,
    )
    return [*(value for pair in sums.values() for value in pair), info["grad_norm"], info["lr"]]


def trained(pair: Sequence[Any], steps: Sequence[int], reference_after: int = 0) -> list[Any]:
    """The policies in turn; each freezes its reference after a step."""
    found: list[list[list[float]]] = [[], []]
    for number in steps:
        for which, policy in enumerate(pair):
            found[which].append(step(policy, 10 * which + number))
            if number == reference_after:
                policy.freeze_reference()
    return found


def state_of(policy: Any) -> dict[str, torch.Tensor]:
    """All that training leaves: log-probs and entropies, also the reference's, factors, merged
    weights."""
    with policy.as_reference():
        reference = _log_probs(policy)
    merged = {f"merged {name}": one.clone() for name, one in policy.parameters().items()}
    policy.release_copies()
    return {"log_probs": _log_probs(policy), "reference": reference, **factors(policy), **merged}


def own_state(policy: Any) -> dict[str, torch.Tensor]:
    """Copies of the factors and of the optimizer's state on this rank."""
    found = {name: one.detach().clone() for name, one in policy.weights().items()}
    for number, inner in enumerate(policy.inner_optimizers()):
        states = enumerate(inner.optimizer.state.values())
        for at, state in states:
            for name, one in state.items():
                found[f"{number} {at} {name}"] = torch.as_tensor(one).clone()
    return found


def differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is not equal bit for bit."""
    names = ours.keys() ^ theirs.keys()
    return sorted(
        names | {name for name in ours.keys() & theirs if not torch.equal(ours[name], theirs[name])}
    )


def storages(stages: Iterable[Any]) -> int:
    """Bytes of all weights of these models, each counted once."""
    from hybridflow.mcore.model import held_weights

    found = {}
    for stage in stages:
        for one in held_weights([stage]).values():
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def built_with(case: Case, base: Any) -> float:
    """Memory of a policy's modules before they get the weights of the base, as a share of these."""
    from hybridflow.mcore import policy as module

    share = module.share_weights
    sizes = []

    def noted(models: Sequence[Any], base_models: Sequence[Any]) -> None:
        sizes.append(storages(models))
        share(models, base_models)

    module.share_weights = noted
    try:
        policy_of(case.parallel, MODELS[case.model], STD, lora=LORA[case.model][0], base=base)
    finally:
        module.share_weights = share
    return sizes[0] / storages(base.stages)


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Both policies on one base and on two, step for step."""
    from hybridflow.mcore import checkpoint
    from hybridflow.mcore.hf_export import export

    result: dict[str, Any] = {"name": case.name, "different": []}
    histories = []
    states = []
    for kind in ("shared", "apart"):
        pair = pair_of(case, kind == "shared")
        stages = [stage for policy in pair for stage in policy.stages]
        result[f"{kind} bytes"] = storages(stages) / storages(pair[0].stages)
        history = trained(pair, range(STEPS - 1))
        if dist.get_rank() == 0:
            (folder / kind).mkdir(parents=True)
        dist.barrier()
        for name, policy in zip(NAMES, pair, strict=True):
            checkpoint.save(policy, folder / kind / name, phase="rl", step=STEPS - 1)
        last = trained(pair, [STEPS - 1], -1)
        histories.append([[*first, *then] for first, then in zip(history, last, strict=True)])
        states.append([state_of(policy) for policy in pair])
        for name, policy in zip(NAMES, pair, strict=True):
            export(policy, folder / kind / f"{name}-merged", MODELS[case.model], None)
        if kind == "shared":
            result["touched"] = _touched(pair)
    result["different"] += [
        name
        for name, one in zip(NAMES, zip(*histories, strict=True), strict=True)
        if one[0] != one[1]
    ]
    for ours, theirs in zip(*states, strict=True):
        result["different"] += differing(ours, theirs)
    # resumed at the last step, the second policy first
    pair = pair_of(case, True)
    for name, policy in reversed([*zip(NAMES, pair, strict=True)]):
        policy.freeze_reference()
        checkpoint.load(policy, folder / "shared" / name)
    again = trained(pair, [STEPS - 1], -1)
    result["resumed"] = [one[-1:] for one in histories[0]] == again
    result["different"] += [
        f"resumed {name}"
        for policy, state in zip(pair, states[0], strict=True)
        for name in differing(state_of(policy), state)
    ]
    result["built"] = built_with(case, pair[0])
    return result


def _touched(pair: Sequence[Any]) -> list[str]:
    """What an update of either policy changes of the other one or of the base."""
    from hybridflow.mcore.model import held_weights
    from hybridflow.models.lora import is_adapter

    first, second = pair
    base = {n: t.clone() for n, t in held_weights(first.stages).items() if not is_adapter(n)}
    found = []
    for trains, other in ((first, second), (second, first)):
        before, mine = own_state(other), own_state(trains)
        step(trains, 99)
        trains.settle()
        found += differing(own_state(other), before)
        assert differing(own_state(trains), mine)
    after = {n: t for n, t in held_weights(second.stages).items() if not is_adapter(n)}
    return found + differing(after, base)
