"""Weights on their way: slices beside gather-then-broadcast and bare sends of gloo; shared memory beside verl's buckets
and a copy.

`make bench NAME=reshard_transfer`; `ARGS=gloo` or `ARGS=shm` runs one part and writes nothing. All sides of a part run
in the same processes, in turns, on the same tensors: a sync is timed from the command to all ranks until the last has
answered.
"""

from __future__ import annotations

from support import conditions

if __name__ == "__main__":
    conditions.ensure()

import sys
import tempfile
from collections.abc import Callable
from typing import Any

from hybridflow.bench.measurements.base import interleaved
from support import peer
from support.pool import Pool, free_port
from support.report import Figure, faster, median, write

ROUNDS = 9
MIB = 1 << 20
WIRES = {"p2p": "over gloo", "tcp": "over tcp"}  # transports of ours between any two hosts
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 1024,
    "intermediate_size": 2048,
    "vocab_size": 32000,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
}
# two layers as Qwen3-235B-A22B's are (config.json of Qwen/Qwen3-235B-A22B), with 10 of their 128 experts
LAYERS = MOE | {
    "num_hidden_layers": 2,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 10,
    "moe_intermediate_size": 1536,
    "intermediate_size": 12288,
    "vocab_size": 4096,
}
MODELS = {"Qwen3-235B-A22B's layers": LAYERS, "MoE of small slices": MOE}  # an expert's slices: 6 MiB, 1 MiB
LARGER = {**MOE, "num_hidden_layers": 15}
GLOO = {"staging": 80 * MIB, "gather_bytes": 64 * MIB, "bare": 16 * MIB}
SHM = {"staging": 8 * MIB, "peer_mb": (2048, 512, 64)}
# verl/workers/config/rollout.py:135, handed on in vllm_rollout.py:235; bucketed_weight_transfer.py:89
PEER_DEFAULTS = {2048: " (its configuration's default)", 512: " (its class's default)"}


def gloo() -> list[Figure]:
    """Four Megatron ranks (TP2, PP2, EP2) to one engine of two, each model."""
    return [figure for name, hf in MODELS.items() for figure in _over_wires(f"{name}, TP2.PP2.EP2 to TP2", hf)]


def _over_wires(name: str, hf: dict[str, Any]) -> list[Figure]:
    pool = Pool(
        6,
        "support.reshard_ranks:Ranks",
        hf=hf,
        trainer={"ranks": 4, "tensor": 2, "pipeline": 2, "expert": 2},
        engine={"tensor": 2},
        port=free_port(),
        dtype="bfloat16",
        staging=GLOO["staging"],
        transports=tuple(WIRES),
        gather_bytes=GLOO["gather_bytes"],
    )
    stats: list[dict[str, Any]] = []
    commits: dict[str, list[float]] = {transport: [] for transport in WIRES}

    def staged(transport: str) -> None:
        stats[:] = pool.run("sync", True, transport)
        commits[transport].append(max(rank["commit"] for rank in stats))

    ours: dict[str, Callable[[], Any]] = {}
    for transport, wire in WIRES.items():
        ours[f"{wire}: staged"] = lambda transport=transport: staged(transport)
        ours[f"{wire}: in place"] = lambda transport=transport: pool.run("sync", False, transport)
    sides: dict[str, Callable[[], Any]] = {
        **ours,
        "gather and broadcast": lambda: pool.run("gather_and_broadcast"),
        "bare": lambda: pool.run("bare", GLOO["bare"]),
        "bare, cached": lambda: pool.run("bare", GLOO["bare"], True),
    }
    try:
        for method, values in (("open", ("wire",)), ("open_bare", ()), ("join", ())):
            pool.run(method, *values)
        for way in (sides["gather and broadcast"], *ours.values()):
            pool.run("forget")
            way()
            assert not any(pool.run("check")), "wrong weights arrived"
        times = {side: median(seconds) for side, seconds in interleaved(sides, ROUNDS).items()}
        timed = [side for side in sides if side.endswith("in place") or side == "bare"]
        cpu = {side: median([sum(used) for used in _cpu(pool, sides[side])]) for side in timed}
    finally:
        pool.stop()
    return _wire_figures(
        name, stats, times, {transport: median(seconds) for transport, seconds in commits.items()}, cpu
    )


def _cpu(pool: Pool, side: Callable[[], Any]) -> list[list[float]]:
    """Processor seconds of each rank in each round: what a busy machine distorts least."""
    found = []
    for _ in range(ROUNDS):
        before = pool.run("cpu")
        side()
        found.append([after - start for after, start in zip(pool.run("cpu"), before, strict=True)])
    return found


def _processor(name: str, ours: float, limit: float) -> Figure:
    return Figure(f"{name}, processor time", ours, "s", limit=limit, share=limit / ours)


def _wire_figures(
    name: str, stats: list[dict[str, Any]], times: dict[str, float], commits: dict[str, float], cpu: dict[str, float]
) -> list[Figure]:
    total = sum(rank["payload_bytes"] for rank in stats[4:])
    bare, cached = (total / times[side] / 1e9 for side in ("bare", "bare, cached"))
    figures = [Figure(f"{name}: bytes", total, "bytes")]
    for transport, wire in WIRES.items():
        label, commit = f"{name} {wire}", commits[transport]
        in_place, staged = times[f"{wire}: in place"], times[f"{wire}: staged"]
        for mode, seconds in (("staged", staged), ("in place", in_place)):
            figures.append(faster(f"{label}: {mode}", seconds, times["gather and broadcast"], "gather, then broadcast"))
        # the copy into place of a staged sync moves nothing between processes
        for mode, seconds in (("staged, without the commit", staged - commit), ("in place", in_place)):
            rate = total / seconds / 1e9
            figures.append(
                Figure(f"{label}: {mode}, rate beside bare gloo", rate, "GB/s", limit=bare, share=rate / bare)
            )
            figures.append(
                Figure(
                    f"{label}: {mode}, rate beside bare gloo from the cache",
                    rate,
                    "GB/s",
                    limit=cached,
                    share=rate / cached,
                )
            )
        figures.append(_processor(f"{label}: in place, all ranks", cpu[f"{wire}: in place"], cpu["bare"]))
        figures.append(Figure(f"{label}: commit", commit, "s"))
    figures.append(Figure(f"{name}: sender's staging", max(rank["peak_staging_bytes"] for rank in stats[:4]), "bytes"))
    return figures


def shm() -> list[Figure]:
    """One rank to one rank of the same host, 1.6 GB."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(
            2,
            "support.bucket_ranks:BucketRanks",
            folder=folder,
            hf=LARGER,
            trainer={"ranks": 1},
            engine={"tensor": 1},
            port=free_port(),
            dtype="bfloat16",
            staging=SHM["staging"],
            transports=("shared_memory",),
            gather_bytes=64 * MIB,
        )
        try:
            pool.run("open", "shm")
            moved = pool.run("peer_sync", 64)[1]
            stats = pool.run("sync", False)
            sides: dict[str, Any] = {
                "in place": lambda: pool.run("sync", False),
                "staged": lambda: pool.run("sync", True),
                "copy": lambda: pool.run("copy"),
            }
            for size in SHM["peer_mb"]:  # type: ignore[attr-defined]
                sides[f"verl {size}"] = lambda size=size: pool.run("peer_sync", size)
            found = {name: median(seconds) for name, seconds in interleaved(sides, ROUNDS).items()}
            cpu = {
                name: median([max(used) for used in _cpu(pool, sides[name])]) for name in ("in place", "staged", "copy")
            }
        finally:
            pool.stop()
    total = stats[1]["payload_bytes"]
    figures = [Figure("one host: bytes", total, "bytes"), Figure("one host: bytes of the peer", moved, "bytes")]
    for side in ("in place", "staged"):
        for size in SHM["peer_mb"]:  # type: ignore[attr-defined]
            label = f"{peer.NAME} bucketed transfer, {size} MiB" + PEER_DEFAULTS.get(size, "")
            theirs = found[f"verl {size}"]
            figures.append(
                faster(
                    f"one host, shared memory: {side}, beside {size} MiB",
                    found[side],
                    theirs,
                    label,
                    limit=found["copy"],
                )
            )
    for side in ("in place", "staged"):
        figures.append(_processor(f"one host, shared memory: {side}, busier rank", cpu[side], cpu["copy"]))
    return figures


def main() -> None:
    """Run both parts, and write the results."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    figures = [figure for name, part in (("gloo", gloo), ("shm", shm)) if wanted in ("", name) for figure in part()]
    if wanted:
        for figure in figures:
            print(f"{figure.metric:<66} {figure.value:.4g} {figure.unit}  ratio {figure.ratio}  share {figure.share}")
        return
    write(
        "reshard_transfer",
        figures,
        {"models": MODELS, "larger": LARGER["num_hidden_layers"], "gloo": GLOO, "shared_memory": SHM},
    )


if __name__ == "__main__":
    main()
