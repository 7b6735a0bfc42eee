"""Training on recorded pairs: from a parquet file to the gradient of the published loss, without a
generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import ActorConfig, AlgorithmConfig, DataConfig, RunConfig
from hybridflow.data.custom import open_training
from hybridflow.data.dataset import PreferenceDataset
from hybridflow.data.prepare import prepare
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import DataError
from hybridflow.fsdp.packed import build_micro_batches
from hybridflow.rollout.recorded import READING, RecordedPairs
from hybridflow.single_controller import block_on
from hybridflow.trainer.advantages import Advantages
from hybridflow.trainer.metrics import preference_metrics
from hybridflow.workers.losses import PolicyLoss
from tests.unit.trainer.worlds import PROMPTS, World, config_of, records, trainer_of

BETA = 0.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {"num_train": 20, "num_test": 5, "num_pairs": 30, "pair_errors": "near"}
    return prepare("arithmetic", tmp_path_factory.mktemp("pairs") / "data", None, options).folder


def pairs_of(folder: Path, config: RunConfig) -> PreferenceDataset:
    data = replace(config.data, answers="pairs", train_files=(str(folder / "pairs.parquet"),))
    dataset = open_training(load_tokenizer(folder / "tokenizer"), data)
    assert isinstance(dataset, PreferenceDataset) and dataset.data_sources == []
    return dataset


def preferring(config: RunConfig, name: str = "dpo") -> RunConfig:
    """The configuration with an estimator that learns preferences."""
    algorithm = AlgorithmConfig(adv_estimator=name, adv_estimator_options={"beta": BETA})
    return replace(config, algorithm=algorithm, data=replace(config.data, answers="pairs"))


def test_a_batch_has_both_answers_of_each_pair_and_goes_on_where_it_was(
    folder: Path, tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    dataset = pairs_of(folder, config)
    source = RecordedPairs(config, dataset, lambda batch: batch)
    batch = block_on(source.take(1))
    assert set(READING.writes) <= set(batch.columns) and len(batch) == 2 * PROMPTS
    assert (
        batch["uid"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        and batch["scores"].tolist() == [1, 0] * PROMPTS
    )
    assert batch.jagged("response_mask").values.all()
    rows = dataset.batch(np.asarray(batch["index"])[::2])
    for pair in range(PROMPTS):
        for row, name in ((2 * pair, "chosen_ids"), (2 * pair + 1, "rejected_ids")):
            assert batch["response_ids"].row(row).tolist() == rows[name].row(pair).tolist()
            assert batch["prompt_ids"].row(row).tolist() == rows["prompt_ids"].row(pair).tolist()
    state = source.state()
    later = block_on(source.take(2))["index"].tolist()
    again = RecordedPairs(config, dataset, lambda batch: batch)
    block_on(again.restore(state))
    assert block_on(again.take(2))["index"].tolist() == later != batch["index"].tolist()
    block_on(again.forget())
    block_on(again.restore(None))
    assert block_on(again.take(1))["index"].tolist() == batch["index"].tolist()


def dpo(ratios: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return -F.logsigmoid(BETA * (ratios[0::2] - ratios[1::2])).mean()


def ipo(ratios: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    means = ratios / sizes
    return ((means[0::2] - means[1::2] - 1 / (2 * BETA)) ** 2).mean()


def kto(ratios: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    z = ratios.mean().clamp(min=0).detach()
    return torch.cat(
        [1 - torch.sigmoid(BETA * (ratios[0::2] - z)), 1 - torch.sigmoid(BETA * (z - ratios[1::2]))]
    ).mean()


@pytest.mark.parametrize("published", [dpo, ipo, kto])
def test_an_update_is_a_step_of_the_published_loss(
    folder: Path, tmp_path: Path, published: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """From the file to the loss of the policy's worker, by autograd in float64; the log-probs are
    those of columns."""
    config = preferring(config_of(tmp_path), published.__name__)
    batch = block_on(RecordedPairs(config, pairs_of(folder, config), lambda batch: batch).take(1))
    responses = batch.jagged("response_ids")
    rng = np.random.default_rng(0)
    old, reference = (rng.normal(-2, 1, len(responses.values)).astype(np.float32) for _ in range(2))
    batch = batch.with_columns(
        old_log_probs=Jagged(old, responses.offsets),
        ref_log_probs=Jagged(reference, responses.offsets),
    )
    batch = Advantages(config).add(batch)
    policy = torch.tensor(old, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor(responses.lengths)
    ratios = torch.stack(
        [row.sum() for row in (policy - torch.tensor(reference)).split(lengths.tolist())]
    )
    (wanted,) = torch.autograd.grad(published(ratios, lengths), policy)

    loss = PolicyLoss(ActorConfig(policy_loss="reinforce", loss_agg_mode="seq-mean-token-sum"))
    [micro] = build_micro_batches(batch, [np.arange(len(batch))], loss.columns, torch.device("cpu"))
    total, count, _ = loss(policy, None, micro)
    (found,) = torch.autograd.grad(total / count, policy)
    # advantages are a float32 column
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=1e-8)
    margins = (ratios[0::2] - ratios[1::2]).detach()
    assert preference_metrics(batch) == pytest.approx(
        {
            "preference/accuracy": float((margins > 0).double().mean()),
            "preference/margin": float(margins.mean()),
        }
    )


def test_preferences_are_counted_by_prompt_and_ties_half() -> None:
    sums = [3.0, 1.0, 2.0, 5.0, 5.0, 9.0, 4.0]
    scores = [1, 0, 0.5, 0, 1, 1, 1]
    uid = [0, 0, 0, 4, 4, 7, 7]
    one = Jagged(np.array(sums, np.float32), np.arange(8))
    batch = DataProto.from_columns(
        {
            "scores": np.array(scores, np.float32),
            "uid": np.array(uid),
            "old_log_probs": one,
            "ref_log_probs": Jagged(np.zeros(7, np.float32), np.arange(8)),
            "response_mask": Jagged(np.ones(7, np.bool_), np.arange(8)),
        }
    )
    # prompt 0: three pairs, all in order; 4: a tie; 7 has equal scores
    assert preference_metrics(batch) == pytest.approx(
        {"preference/accuracy": 3.5 / 4, "preference/margin": (2 + 0) / 2}
    )
    assert preference_metrics(batch.rows([5, 6])) == {}


def test_the_loop_reads_pairs_and_asks_the_engines_for_validation_alone(
    folder: Path, tmp_path: Path
) -> None:
    config = preferring(config_of(tmp_path, total_steps=3, test_every_steps=2))
    world = World()
    trainer = trainer_of(
        config, world, RecordedPairs(config, pairs_of(folder, config), lambda batch: batch)
    )
    block_on(trainer.start_from_present_weights())
    block_on(trainer.fit())
    # the stand-in's reference asks its log_probs
    step = ["log_probs", "ref_log_probs", "log_probs", "update"]
    assert world.calls == [
        *("freeze_reference", "set_optimizer", "sync 0", "answer", *step),
        *(*step, "sync 2", "answer", *step, "sync 3", "answer", "save"),
    ]
    found = records(trainer, "train")
    # policy and reference are the same here
    assert [record["preference/accuracy"] for record in found] == [0.5] * 3
    assert not any(name.startswith("rollout/logprob_diff") for record in found for name in record)
    assert [any(name.startswith("sync/") for name in record) for record in found] == [
        False,
        True,
        True,
    ]
    assert not (trainer.session.folder / "rollouts").exists()


def test_prompts_without_recorded_answers_are_refused(folder: Path) -> None:
    data = DataConfig(answers="pairs", train_files=(str(folder / "train.parquet"),))
    with pytest.raises(DataError, match="column 'chosen', 'rejected' is missing; the file has"):
        open_training(load_tokenizer(folder / "tokenizer"), data)
