"""Numbers that nothing can carry, paths where something else is, and arguments that engines may not
be given."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybridflow.config.keys import all_keys
from hybridflow.config.schema import RunConfig
from tests.unit.config.small import found

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.mark.slow
def test_no_whole_number_and_no_deadline_is_larger_than_what_carries_it() -> None:
    """Engines add their number to a seed of 32 bits; JSON, numpy and the system's clocks have
    bounds of their own."""
    assert found("seed=4000000000") == []
    for value, key in (
        (4294967296, "seed"),
        (10**400, "seed"),
        (2**64, "rollout.max_total_tokens"),
    ):
        [line] = found(f"{key}={value}")
        assert line.startswith(f"{key}={value} must be at least") and " and at most " in line
    large = {
        key: str(2**63) if kind.type is int else "1e12"
        for key, kind in all_keys(RunConfig)
        if (kind.type is int and not kind.is_list) or (kind.type is float and key.endswith("_s"))
    }
    lines = found(*(f"{key}={value}" for key, value in large.items()))
    for key in large:
        said = f"{key}="
        assert any(line.startswith(said) and " at most " in line for line in lines), key
    assert "at least 7.86432e+07" in found("cluster.object_store_bytes=1000")[0]  # Ray's own


@pytest.mark.slow
def test_paths_where_something_else_is_are_refused() -> None:
    Path("file").touch()
    Path("folder").mkdir()
    assert found("output_dir=folder", "data.prepare.out=folder/new") == []
    for overrides, expected in (
        (
            ["output_dir=file"],
            r"output_dir: cannot create the folder file/e2e, because \S+/file is a file",
        ),
        (
            ["output_dir=file/deeper/runs"],
            r"output_dir: .* because \S+/file is a file; choose another output_dir",
        ),
        (["data.prepare.out=file"], r"data\.prepare\.out: cannot create the folder file"),
        (
            ["data.train_files=[folder]"],
            r"data\.train_files: folder is a folder; list its data files",
        ),
        (["data.prepare.source=file"], r"data\.prepare\.source=file: folder not found"),
        (["model.tokenizer=file"], r"model\.tokenizer=file is a file; set it to the folder"),
        (["data.dataset_class.path=folder"], r"data\.dataset_class\.path=folder: file not found"),
        (["reward.path=folder"], r"reward\.path=folder: file not found"),
    ):
        assert any(re.match(expected, line) for line in found(*overrides)), (
            overrides,
            found(*overrides),
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("speculative_algorithm=EAGLE", "that no sync updates"),
        ("spec=EAGLE", "that no sync updates"),  # command lines take beginnings of names
        ("preferred_sampling_params={min_p:0.3}", "sampled differently from rollout.sampling"),
        ("enable-custom-logit-processor=true", "sampled differently from rollout.sampling"),
        ("quantization=fp8", "rollout.quantization or model.dtype"),
        ("load_format=auto", "weights that the trainer sends"),
        ("enable_lora=true", "docs/lora.md"),
        ("enable_eplb=true", "that a sync writes to"),
        ("hicache_storage_backend=file", "older weights"),
        ("tokenizer_mode=slow", "token ids of model.tokenizer"),
        ("disaggregation_mode=prefill", "the job sets the format"),
        ("tp_size=2", "set rollout.tensor instead"),
        ("trust_remote_code=true", "runs code from files"),
    ],
)
def test_an_argument_of_the_engines_server_that_means_something_else_is_refused(
    given: str, said: str
) -> None:
    [line] = found(f"+rollout.extra_args.{given}")
    assert line.startswith(f"rollout.extra_args.{given.partition('=')[0]}=") and said in line
