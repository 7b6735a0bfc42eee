"""Scores and what a reward returns beside them: in the batch, the dumps, the metrics and the
report."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import AgentConfig, DataConfig, RewardConfig, RolloutConfig, RunConfig
from hybridflow.config.val_sets import VAL_SET
from hybridflow.observe.report import facts, write_report
from hybridflow.observe.rollouts import dump_path, read_rollouts
from hybridflow.observe.run_folder import load_run
from hybridflow.observe.tracker import Tracker
from hybridflow.rewards import RewardManager
from hybridflow.rollout.evaluation import (
    Scorer,
    Validator,
    dump_batch,
    extra_metrics,
    failures,
    sources_to_score,
    without_failed,
)
from hybridflow.single_controller import block_on
from hybridflow.trainer.session import Session
from tests.unit.trainer.worlds import World, config_of, records, trainer_of

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    size = len(solution_str)
    return {"score": size / 2, "length": size, "brief": size < 3, "said": solution_str, "odd": float("nan")}
"""


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + token) for token in ids)

    decode_response = decode


def objects(*values: Any) -> np.ndarray:
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def batch_of(*responses: str, source: str = "toy") -> DataProto:
    count = len(responses)
    rows = [np.array([ord(letter) - 97 for letter in text]) for text in responses]
    return DataProto.from_columns(
        {
            "prompt_ids": Jagged.from_rows([np.array([0])] * count, np.int64),
            "response_ids": Jagged.from_rows(rows, np.int64),
            "response_mask": Jagged.from_rows([np.ones(len(row)) for row in rows], np.bool_),
            "response_versions": Jagged.from_rows([np.zeros(len(row)) for row in rows], np.int64),
            "data_source": objects(*[source] * count),
            "ground_truth": objects(*["a"] * count),
            "extra_info": objects(*[{}] * count),
            "finish_reason": objects(*["stop"] * count),
            "weight_version": objects(*["1"] * count),
            "index": np.arange(count),
        }
    )


@pytest.fixture
def scorer(tmp_path: Path) -> Scorer:
    (tmp_path / "reward.py").write_text(REWARD)
    letters: Any = Letters()
    return Scorer(
        RewardManager(RewardConfig(processes=0, path=str(tmp_path / "reward.py"))), letters
    )


def test_what_a_reward_returns_beside_the_score_reaches_dumps_metrics_and_report(
    tmp_path: Path, scorer: Scorer
) -> None:
    batch = batch_of("ab", "abcd")
    batch = batch.union(block_on(scorer.score(batch)))
    metrics = extra_metrics(batch)
    assert metrics["reward_extra/length/mean"] == 3 and metrics["reward_extra/length/max"] == 4
    assert metrics["reward_extra/brief/mean"] == 0.5
    assert {name.split("/")[1] for name in metrics} == {"length", "brief"}, (
        "text and NaN are no metrics"
    )
    run = tmp_path / "run"
    dump_batch(run / "rollouts", 1, batch, scorer.tokenizer)
    extras = [
        json.loads(row["reward_extra"]) for row in read_rollouts(dump_path(run / "rollouts", 1))
    ]
    assert [extra["length"] for extra in extras] == [2, 4] and extras[0]["said"] == "ab"
    with Tracker(run, ("jsonl",)) as tracker:
        tracker.log(1, metrics)
        tracker.log(2, metrics)
    page = write_report(run).read_text(encoding="utf-8")
    assert "Reward: length, mean of the batch" in page
    assert "&#34;said&#34;: &#34;abcd&#34;" in page


def test_scores_do_not_depend_on_when_their_scoring_began(tmp_path: Path) -> None:
    """Parts that end in another order than they began, in processes, are the columns of one call
    for all."""
    (tmp_path / "slow.py").write_text(
        "import time\n\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    time.sleep(0.3 if solution_str == 'abc' else 0.0)\n"
        "    return {'score': float(len(solution_str)), 'said': solution_str} if solution_str else "
        "1 / 0\n"
    )
    letters: Any = Letters()
    batch = batch_of("abc", "a", "ab", "", "abcd", "abc")
    with RewardManager(RewardConfig(processes=2, path=str(tmp_path / "slow.py"))) as rewards:
        scorer = Scorer(rewards, letters)
        whole = block_on(scorer.score(batch))
        parts = scorer.begin(batch, 2)
        found = block_on(scorer.finish(parts))
        assert (
            set(found.columns)
            == set(whole.columns)
            == {"response_text", "scores", "reward_extra", "reward_failure"}
        )
        assert all(found[name].tolist() == whole[name].tolist() for name in whole.columns)
        last_first = block_on(scorer.finish(scorer.begin(batch, 2)[::-1]))
        assert last_first["scores"].tolist() == [4.0, 3.0, 2.0, 0.0, 3.0, 1.0]


def test_what_scores_in_the_driver_begins_when_all_answers_are_there_and_all_of_it_together(
    tmp_path: Path,
) -> None:
    """So that it does not hold up the engines, and calls of two prompts can wait for each other."""
    (tmp_path / "meets.py").write_text(
        "import asyncio\n\nwaiting = []\n\n\n"
        "async def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    waiting.append(asyncio.get_running_loop().create_future())\n"
        "    if len(waiting) == 2:\n"
        "        [one.set_result(None) for one in waiting]\n"
        "    async with asyncio.timeout(60):\n"
        "        await waiting[-1]\n"
        "    return [float(len(text)) for text in solution_strs]\n"
    )
    letters: Any = Letters()
    rewards = RewardManager(RewardConfig(processes=0, path=str(tmp_path / "meets.py")))
    scorer = Scorer(rewards, letters)
    groups = [
        batch_of(*texts).with_columns(uid=np.zeros(2, np.int64))
        for texts in (("a", "ab"), ("abc", "a"))
    ]
    parts = [part for group in groups for part in scorer.begin(group, 2)]
    assert block_on(scorer.finish(parts))["scores"].tolist() == [1.0, 2.0, 3.0, 1.0]


def test_a_verifier_that_reads_the_prompt_is_given_it(tmp_path: Path) -> None:
    source = (
        "from hybridflow.rewards.verifiers.base import verifier\n\n\n@verifier('echo', "
        "data_sources=['echo'])\n"
    )
    source += (
        "def echo(response, ground_truth, *, prompt):\n    return {'score': 1.0, 'asked': prompt}\n"
    )
    (tmp_path / "own.py").write_text(source)
    rewards = RewardManager(RewardConfig(processes=0, verifiers=(f"{tmp_path / 'own.py'}:echo",)))
    letters: Any = Letters()
    found = block_on(Scorer(rewards, letters).score(batch_of("ab", "c", source="echo")))
    assert [extra["asked"] for extra in found["reward_extra"]] == [letters.decode([0])] * 2


def conversations() -> DataProto:
    columns = {
        "answer_text": objects("ab", "c"),
        "messages": objects([{"role": "assistant", "content": "ab"}], []),
        "turn_rewards": objects([0.5, 0.25], []),
    }
    return batch_of("ab", "c", source="a game").union(DataProto.from_columns(columns))


def test_rewards_of_an_agent_loop_are_the_score() -> None:
    """No verifier is asked: there is none for this data source."""
    letters: Any = Letters()
    found = block_on(
        Scorer(RewardManager(RewardConfig(processes=0)), letters).score(conversations())
    )
    assert found["scores"].tolist() == [0.75, 0.0]
    assert found["reward_extra"].tolist() == [{"turn_rewards": [0.5, 0.25]}, {"turn_rewards": []}]
    assert "reward_failure" not in found


def test_a_function_of_ones_own_is_given_the_rewards_of_an_agent_loop(tmp_path: Path) -> None:
    source = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    source += "    return len(extra_info['turn_rewards']) + len(extra_info['messages'])\n"
    (tmp_path / "own.py").write_text(source)
    rewards = RewardManager(RewardConfig(processes=0, path=str(tmp_path / "own.py")))
    letters: Any = Letters()
    assert block_on(Scorer(rewards, letters).score(conversations()))["scores"].tolist() == [
        3.0,
        0.0,
    ]


@pytest.mark.parametrize(
    ("loop", "path", "sources"),
    [("environment", None, []), ("tools", None, ["x", "y"]), ("environment", "r.py", ["x", "y"])],
)
def test_data_sources_need_a_verifier_unless_the_loop_gives_the_rewards(
    loop: str, path: str | None, sources: list[str]
) -> None:
    config = RunConfig(
        rollout=RolloutConfig(agent=AgentConfig(loop=loop)), reward=RewardConfig(path=path)
    )
    train = SimpleNamespace(data_sources=["x"])
    held_out = SimpleNamespace(data_sources=["y"])
    prompts: Any = (train, held_out)
    assert sources_to_score(config, *prompts) == sources


@pytest.mark.parametrize(("answers", "accuracy"), [(("ab", ""), 0.5), (("ab", "abc"), None)])
def test_accuracy_is_said_where_every_score_is_0_or_1_alone(
    tmp_path: Path, scorer: Scorer, answers: tuple[str, ...], accuracy: float | None
) -> None:
    """A length bonus is no share of right answers."""
    batch = batch_of(*answers)
    given: Any = batch.select(["prompt_ids", "data_source", "ground_truth", "extra_info", "index"])
    rest = batch.select(
        ["response_ids", "response_mask", "response_versions", "finish_reason", "weight_version"]
    )

    class Rows:
        __len__ = lambda self: len(given)  # noqa: E731
        batch = lambda self, indices: given  # noqa: E731

    class Engines:
        begin = lambda self, prompts, training: list(range(len(rest)))  # noqa: E731

        async def answers(self, samples: Sequence[int]) -> DataProto:
            return rest

    rows: Any = Rows()
    engines: Any = Engines()
    metrics = block_on(Validator(RunConfig(), {"": rows}, scorer, tmp_path).run(engines, 0))
    assert (
        metrics["val/score"]
        == metrics["val/toy/score"]
        == np.mean([len(answer) / 2 for answer in answers])
    )
    assert metrics.get("val/accuracy") == metrics.get("val/toy/accuracy") == accuracy
    assert metrics["val/reward_extra/length/mean"] == np.mean([len(answer) for answer in answers])
    with Tracker(tmp_path, ("jsonl",)) as tracker:
        tracker.log(0, metrics, "val")
    title, shown, _ = facts(load_run(tmp_path))[0]
    assert (title, shown) == (
        ("Held-out accuracy", "50.0 %") if accuracy else ("Held-out score", "1.25")
    )


def held_out(*answers: str) -> Any:
    """A dataset whose prompts are numbered from 0, and whose answers are these."""
    rows = batch_of(*answers, source="toy").select(
        ["prompt_ids", "data_source", "ground_truth", "extra_info", "index"]
    )
    return type(
        "Rows",
        (),
        {"__len__": lambda self: len(rows), "batch": lambda self, indices: rows.rows(indices)},
    )()


class Answering:
    """Engines that answer at once, each named set with answers of its own, in turns."""

    def __init__(self, **answers: Sequence[str]) -> None:
        self.said = answers
        self.given = list[DataProto]()
        self.asked: dict[str, int] = {}

    def begin(self, prompts: DataProto, *, training: bool) -> list[int]:
        assert not training
        name = str(prompts[VAL_SET][0]) if VAL_SET in prompts else "unnamed"
        self.asked[name] = len(prompts)
        first = sum(map(len, self.given))
        self.given.append(
            batch_of(*(self.said[name][row % len(self.said[name])] for row in range(len(prompts))))
        )
        return list(range(first, first + len(prompts)))

    async def answers(self, samples: Sequence[int]) -> DataProto:
        found = DataProto.concat(self.given).rows(list(samples))
        return found.select(
            [
                "response_ids",
                "response_mask",
                "response_versions",
                "finish_reason",
                "weight_version",
            ]
        )


def test_each_validation_set_has_metrics_samples_and_dumps_of_its_own(
    tmp_path: Path, scorer: Scorer
) -> None:
    sets = {
        "hard": {"files": ["h"], "samples": 4, "sampling": {"temperature": 1.0}},
        "easy": {"files": ["e"]},
    }
    config = RunConfig(data=DataConfig(val_sets=sets))
    datasets = {"": held_out("ab", "ab"), "hard": held_out("a"), "easy": held_out("ab", "ab", "ab")}
    engines: Any = Answering(unnamed=["ab"], hard=["ab", "", "", ""], easy=["abc"])
    metrics = block_on(Validator(config, datasets, scorer, tmp_path).run(engines, 3))
    assert engines.asked == {"unnamed": 2, "hard": 4, "easy": 3}
    assert {name: metrics[f"{name}/score"] for name in ("val", "val-hard", "val-easy")} == {
        **{"val": 1.0, "val-hard": 0.25, "val-easy": 1.5}
    }
    assert (
        metrics["val-hard/pass@2"] == pytest.approx(0.5) and metrics["val-hard/toy/best@4"] == 1.0
    )
    core = {name: value for name, value in metrics.items() if name.startswith("val-core")}
    assert not [name for name in metrics.keys() - core if "@" in name and "val-hard/" not in name]
    assert core == {
        "val-core/toy/reward/mean@1": 1.0,
        "val-core-hard/toy/reward/mean@4": 0.25,
        "val-core-hard/toy/reward/best@4/mean": 1.0,
        "val-core-easy/toy/reward/mean@1": 1.5,
    }
    assert "val-easy/accuracy" not in metrics and metrics["val-easy/reward_extra/length/mean"] == 3
    alone = block_on(
        Validator(config, {"": datasets[""]}, scorer, tmp_path / "alone").run(engines, 3)
    )
    of_first = ("val/", "val-core/")
    assert alone == {name: value for name, value in metrics.items() if name.startswith(of_first)}
    counts = {
        folder: len(read_rollouts(dump_path(tmp_path / folder, 3)))
        for folder in ("validation", "validation-hard")
    }
    assert counts == {"validation": 2, "validation-hard": 4}


def test_report_and_console_name_the_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Tracker(tmp_path, ("jsonl", "console")) as tracker:
        for step, value in ((0, 0.25), (2, 0.5)):
            tracker.log(
                step,
                {"val-hard/score": value, "val-easy/score": 2.5, "val-hard/toy/score": 0.0},
                "val",
            )
    assert "val-hard/score 0.25  val-easy/score 2.5\n" in capsys.readouterr().out
    (tmp_path / "summary.json").write_text('{"score_before": 0.25, "score_after": 0.5}')
    dump_batch(tmp_path / "validation-hard", 0, scored_batch(), cast(Any, Letters()))
    run = load_run(tmp_path)
    assert [fact[:2] for fact in facts(run)[:2]] == [
        ("Held-out score of hard", "0.25 → 0.5"),
        ("Held-out score of easy", "2.5 → 2.5"),
    ]
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "Validation answers of hard of step 0" in page and "Held-out score of easy" in page
    assert "no val step was recorded" not in page


def scored_batch() -> DataProto:
    return batch_of("ab").with_columns(response_text=objects("ab"), scores=np.ones(1, np.float32))


def test_a_run_without_held_out_prompts_writes_json_without_nan(tmp_path: Path) -> None:
    trainer = trainer_of(config_of(tmp_path, total_steps=1), World())
    trainer.records.validator.datasets.clear()
    block_on(trainer.fit())
    assert records(trainer, "val") == []
    assert not {"score_before", "score_after"} & set(trainer.session.totals)


def test_a_file_of_the_run_never_holds_nan(tmp_path: Path) -> None:
    session = Session(config_of(tmp_path))
    session.folder.mkdir(parents=True)
    path = session.write_json("summary.json", {"score_before": math.nan, "score_after": 0.5})
    assert json.loads(path.read_text()) == {"score_before": None, "score_after": 0.5}
    with pytest.raises(TypeError, match="not JSON serializable"):
        session.write_json("summary.json", {"score_after": 0.7, "deep": {"score": object()}})
    assert json.loads(path.read_text())["score_after"] == 0.5  # whole or not at all
    session.write_json("summary.json", {"deep": {"score": math.nan}})
    assert json.loads(path.read_text()) == {"deep": {"score": None}}


def test_a_dropped_row_enters_no_loss_and_leaves_the_mean_of_its_group(tmp_path: Path) -> None:
    batch = batch_of("ab", "abc", "a", "abcd").with_columns(
        uid=np.array([0, 0, 0, 1]),
        response_text=objects("ab", "abc", "a", "abcd"),
        scores=np.array([1.0, 0.0, 0.5, 0.0], np.float32),
        reward_failure=objects(None, "late", None, "late"),
    )
    assert without_failed(batch, "zero") is batch
    kept = without_failed(batch, "drop")
    assert kept["scores"].tolist() == [1.0, 0.75, 0.5, 0.0]
    assert [row.sum() for row in kept.jagged("response_mask")] == [2, 0, 1, 0]
    assert failures(batch) == ["2 of 4 rows have no score (first: row 1): late"]
    assert extra_metrics(batch) == {"reward/failed": 0.5}
    dump_batch(tmp_path, 1, kept, cast(Any, Letters()))
    rows = list(read_rollouts(dump_path(tmp_path, 1)))
    assert [json.loads(row["reward_extra"]) for row in rows] == [
        {},
        {"failure": "late"},
        {},
        {"failure": "late"},
    ]
