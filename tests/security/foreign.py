"""A run folder as a run leaves it, and what somebody may make of it before handing it on."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from hybridflow.config.load import dump_yaml
from hybridflow.config.schema import RunConfig
from hybridflow.observe.rollouts import dump_path, dump_rollouts
from hybridflow.observe.timeline import Timeline
from hybridflow.observe.tracker import Tracker
from hybridflow.saving.manifest import (
    INDEX,
    MANIFEST,
    Manifest,
    digest_of,
    read_sealed,
    write_json,
    write_sealed,
)
from hybridflow.saving.rectangles import Rectangle, write_tensors

SECRET = "the key of somebody's account"
STEER = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m"
DEEP = '{"a":' * 200_000
MODEL = {"model_type": "qwen3", "hidden_size": 32}
STATE = {"totals": {}, "sampler": {}}


def run_folder(folder: Path) -> Path:
    """Steps 1 and 2 of a run, each dumped, with a checkpoint after the first."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_yaml(RunConfig(name="theirs")))
    with Tracker(folder, ("jsonl",)) as tracker:
        for step in (1, 2):
            tracker.log(step, {"critic/score/mean": step / 2, "timing_s/step": 1.0})
    timeline = Timeline(folder / "timeline.jsonl")
    for step in (1, 2):
        with timeline.phase("step", step):
            pass
    timeline.close()
    for name in ("summary.json", "environment.json"):
        (folder / name).write_text(json.dumps({"status": "finished", "steps": 2}))
    for step in (1, 2):
        rows = {
            "prompt_text": ["p"] * 2,
            "response_text": ["r"] * 2,
            "score": [0.0, 1.0],
            "uid": [0, 1],
        }
        dump_rollouts(dump_path(folder / "rollouts", step), rows)
    checkpoint = folder / "checkpoints" / "global_step_1"
    policy = checkpoint / "policy"
    policy.mkdir(parents=True)
    weights = Rectangle("w", torch.arange(24.0).reshape(4, 6), (4, 6), (0, 0))
    chunks, _ = write_tensors(policy, 0, [weights])
    write_json(policy / INDEX, {"chunks": chunks, "hf": [["w", [0, 0], [4, 6], "w", [0, 0]]]})
    seal_again(policy)
    write_sealed(
        checkpoint / "driver.json",
        {"phase": "rl", "step": 1, "state": STATE, "roles": ["policy"], "files": {}},
    )
    write_json(folder / "checkpoints" / "latest.json", {"folder": "global_step_1"})
    return folder


def seal_again(policy: Path, **values: Any) -> None:
    """Write a manifest with the hashes of the files that are there, and with these values."""
    files = {
        path.name: digest_of(path)
        for path in sorted(policy.iterdir())
        if path.name != MANIFEST and path.is_file()
    }
    layout = {"world": 1}
    created = "2026-01-01T00:00:00Z"
    Manifest("rl", 1, ("model",), layout, "float32", MODEL, {"torch": "x"}, created, files).write(
        policy
    )
    if values:
        reseal(policy / MANIFEST, **values)


def reseal(file: Path, **values: Any) -> None:
    """Give a sealed file other values and the right hash of itself."""
    write_sealed(file, {**read_sealed(file), **values})


def _files(run: Path) -> list[Path]:
    return sorted(path for path in run.rglob("*") if path.is_file())


def deep(run: Path) -> None:
    for file in _files(run):
        file.write_text(DEEP)


def deep_yaml(run: Path) -> None:
    (run / "config.yaml").write_text("a: " + "[" * 100_000)


def pipes(run: Path) -> None:
    for file in _files(run):
        file.unlink()
        os.mkfifo(file)


def sockets(run: Path) -> None:
    here = Path.cwd()
    for file in _files(run):
        file.unlink()
        os.chdir(file.parent)  # the name of a socket has few characters
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(file.name)
        os.chdir(here)


def endless(run: Path) -> None:
    for file in _files(run):
        file.unlink()
        file.symlink_to("/dev/zero")


def endless_and_expected(run: Path) -> None:
    """A device and a pipe in place of two files that are empty, as the manifest says."""
    policy = run / "checkpoints" / "global_step_1" / "policy"
    for name in ("a", "b"):
        (policy / name).write_bytes(b"")
    seal_again(policy)
    for name in ("a", "b"):
        (policy / name).unlink()
    (policy / "a").symlink_to("/dev/zero")
    os.mkfifo(policy / "b")


def sparse(run: Path) -> None:
    for file in _files(run):
        with file.open("r+b") as stream:
            stream.truncate(1 << 40)


def sparse_and_expected(run: Path) -> None:
    policy = run / "checkpoints" / "global_step_1" / "policy"
    with (policy / "rank_0.bin").open("r+b") as stream:
        stream.truncate(0)
        stream.truncate(1 << 40)
    files = read_sealed(policy / MANIFEST)["files"]
    reseal(policy / MANIFEST, files={**files, "rank_0.bin": {"size": 1 << 40, "xxh3": "0" * 32}})


def links(run: Path) -> None:
    """Every file is a link to one of the reader's."""
    for number, file in enumerate(_files(run)):
        secret = run.parent / f"secret-{number}"
        content = file.read_bytes()
        if file.suffix in (".json", ".jsonl", ".yaml"):
            content = content.replace(b"theirs", SECRET.encode()).replace(
                b"finished", SECRET.encode()
            )
            content = content.replace(b"rl", SECRET.encode()) if file.name == MANIFEST else content
        secret.write_bytes(content)
        file.unlink()
        file.symlink_to(secret)


def manifest_lies(run: Path) -> None:
    reseal(
        run / "checkpoints" / "global_step_1" / "policy" / MANIFEST,
        step=-7,
        layout=[1],
        lora=["x"],
        versions="1",
    )


def huge_numbers(run: Path) -> None:
    lines = [
        {"step": 1 << 80, "phase": "train"},
        {"step": 3, "phase": "train", "critic/score/mean": 1 << 2000},
    ]
    lines += [
        {"step": 4, "phase": "train", "critic/score/mean": value}
        for value in (1e308, -1e308, 5e-324, 1.0)
    ]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
        file.write(
            '{"step": 5, "phase": "train", "critic/score/mean": 1e999}\n{"step": NaN, "phase": '
            '"train"}\n'
        )
    (run / "timeline.jsonl").write_text(
        '{"name": "step", "step": 1, "seconds": 1e999}\n{"name": "gen", "seconds": 1e300}\n'
    )
    (run / "summary.json").write_text(
        '{"steps": 1e999, "wall_time_s": NaN, "score_before": -1e999, "planned": {"seconds": 3}}'
    )
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("total_steps: 1\n", f"total_steps: {10**4000}\n"))


def twice(run: Path) -> None:
    """Keys that come twice: each reader sees another value."""
    for file in (run / "checkpoints").rglob("*.json"):
        file.write_text(file.read_text().replace("{", '{"step": 1, "step": 2, ', 1))


def encodings(run: Path) -> None:
    for file in _files(run):
        if file.suffix in (".json", ".jsonl", ".yaml"):
            file.write_bytes(
                file.read_text().encode("utf-16")
                if file.suffix == ".json"
                else b"\xe9" + file.read_bytes()
            )


def steering(run: Path) -> None:
    """Characters that move a cursor or set a title, in every name and value."""
    named = json.dumps(STEER)
    (run / "config.yaml").write_text(dump_yaml(RunConfig(name=STEER)))
    (run / "summary.json").write_text(f'{{"status": {named}, {named}: {named}}}')
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            f'{{"step": 3, "phase": "train", {json.dumps("timing_s/" + STEER)}: 1.0, "warning": '
            f"{named}}}\n"
        )
    texts = {
        name: [STEER] for name in ("prompt_text", "response_text", "ground_truth", "finish_reason")
    }
    dump_rollouts(dump_path(run / "rollouts", 2), {**texts, "score": [1.0]})
    (run / "rollouts" / f"step_{STEER}.parquet").write_text("")
    policy = run / "checkpoints" / "global_step_1" / "policy"
    (policy / f"rank{STEER}").write_text("x")
    seal_again(policy, phase=STEER, versions={STEER: STEER}, created=STEER)
    policy.parent.rename(policy.parent.with_name(f"global_step_1{STEER}"))
    write_json(run / "checkpoints" / "latest.json", {"folder": f"global_step_1{STEER}"})


def bombs(run: Path) -> None:
    """Little on the disk, much in memory."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    (run / "config.yaml").write_text("\n".join([*lines, "name: *a11", "model: {path: *a11}"]))
    for step in (1, 2):
        table = pa.table({"response_text": ["a" * 4_000_000] * 100, "score": [0.5] * 100})
        pq.write_table(
            table, dump_path(run / "rollouts", step), compression="zstd", use_dictionary=False
        )
    names = {f"reward_extra/{n}/mean": 1.0 for n in range(30_000)}
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(
            json.dumps({"step": step, "phase": "train", **names}) + "\n" for step in (3, 4)
        )
        file.write("[" * 5_000_000 + "\n")
    (run / "summary.json").write_text(
        "{" + ", ".join(f'"k{n}": [[], {{}}]' for n in range(200_000)) + "}"
    )
    index = run / "checkpoints" / "global_step_1" / "policy" / INDEX
    index.write_text('{"chunks": [' + "[]," * 20_000_000 + "[]]}")


def many_records(run: Path) -> None:
    with (run / "metrics.jsonl").open("w") as file:
        for block in range(200):
            file.write(
                "".join(
                    f'{{"step":{block * 10_000 + n},"phase":"train","a":1}}\n'
                    for n in range(10_000)
                )
            )


def wrong_content(run: Path) -> None:
    """Right hashes over content that no run writes."""
    reseal(
        run / "checkpoints" / "global_step_1" / "driver.json",
        phase=["rl"],
        step="1",
        state=[1],
        fingerprint=7,
    )
    for step in (1, 2):
        pq.write_table(
            pa.table({"score": ["high"], "uid": [None], "response_text": [3]}),
            dump_path(run / "rollouts", step),
        )
    (run / "model").mkdir()
    (run / "model" / "tokenizer.json").write_bytes(struct.pack("<Q", 1 << 63))


HOSTILE: dict[str, Callable[[Path], None]] = {
    make.__name__: make
    for make in (
        *(
            deep,
            deep_yaml,
            pipes,
            sockets,
            endless,
            endless_and_expected,
            sparse,
            sparse_and_expected,
            links,
        ),
        *(
            manifest_lies,
            huge_numbers,
            twice,
            encodings,
            steering,
            bombs,
            many_records,
            wrong_content,
        ),
    )
}
