import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.config.schema import RewardConfig
from hybridflow.errors import ConfigError, DataError
from hybridflow.rewards import RewardManager
from hybridflow.rewards.verifiers.base import by_data_source
from hybridflow.rewards.verifiers.gsm8k import extract_gsm8k_answer

GSM8K = "openai/gsm8k"


def _score(source: str, response: str, truth: object, **kwargs: object) -> float:
    return (
        RewardManager(RewardConfig(processes=0, kwargs=kwargs))
        .score([source], [response], [truth])[0]
        .score
    )


def _custom(
    tmp_path: Path, code: str, name: str = "compute_score", **kwargs: object
) -> RewardManager:
    (tmp_path / "reward.py").write_text(textwrap.dedent(code))
    return RewardManager(
        RewardConfig(
            processes=0,
            path=str(tmp_path / "reward.py"),
            name=name,
            kwargs=kwargs,
            on_failure="stop",
        )
    )


# --- built-in verifiers


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("064", 1.0),
        (" 064\n", 1.0),
        ("64", 0.0),
        ("0640", 0.0),
        ("460", 0.0),
        ("", 0.0),
        ("0<unk>64", 0.0),
    ],
)
def test_arithmetic_wants_the_answer_as_it_is_written(response, score):
    assert _score("arithmetic", response, "064") == score


@pytest.mark.parametrize(
    "response",
    [
        "48/2 = 24, 24 + 48 = 1272.\n#### 1272",
        "#### 1,272",
        "#### $1,272.00.",
        "####1272",
        "#### +1272",
        "####\n1272",
        "#### 7\nNo, wait.\n#### 1272",
        "#### 1272 dollars\n\nI hope that helps 5 people.",
        "#### $ 1272",
        "#### 01272",
        "#### 1272 m2",
        "#### 1272m2",
        "#### 1272 dollars for 2 eggs",
        "#### 1272 miles in 3.5 hours",
        "#### 1272 (per 100 people)",
        "#### 1272\n\n#### Explanation",
        "#### 1272\n\n#### Explanation\nThere are 2 cows.",
        "#### 7\n#### 1272\n#### Note",
    ],
)
def test_gsm8k_accepts_the_answer_in_the_forms_of_the_dataset(response):
    assert _score(GSM8K, response, "1272") == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        "1272",
        "#### ",
        "#### 1273",
        "#### -1272",
        "#### 1272 or 1273",
        "#### 1272/1",
        "#### 1272.5",
        "#### 12 72",
        "#### 1272\n#### 1272 or 1273",
        "#### 1272\n#### between 1 and 2",
        "#### 1272 (or 25)",
        "#### 1272 or for 25",
        "#### 1272, 1273",
        "#### 1272 to 1280",
        "#### 1272 dollars and 50 cents",
        "#### 1272 = 1273",
        "#### 1272m2 or 1273",
        "#### 1272x2",
        "#### 1272 x2",
        "#### the answer is 1272",
        "#### --1272",
        "#### -$-1272",
        "#### 12721",
        "#### \u0661\u0662\u0667\u0662",
    ],
)
def test_gsm8k_refuses_wrong_missing_and_double_answers(response):
    assert _score(GSM8K, response, "1272") == 0.0


@pytest.mark.parametrize(
    "response", ["#### -5", "#### - 5", "#### -$5", "#### $-5", "#### \u22125", "#### -5.0"]
)
def test_gsm8k_negative_answers(response):
    assert _score(GSM8K, response, "-5") == 1.0
    assert _score(GSM8K, response, "5") == 0.0


@pytest.mark.slow
@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_gsm8k_scores_exactly_the_equal_number(answer, truth):
    assert _score(GSM8K, f"so it is\n#### {answer:,}", str(truth)) == float(answer == truth)
    assert _score(GSM8K, f"#### {truth}", str(truth)) == 1.0


def test_gsm8k_compares_exactly_where_floats_would_not():
    assert _score(GSM8K, "#### 9007199254740993", "9007199254740992") == 0.0
    assert _score(GSM8K, "#### " + "9" * 5000, "9" * 5000) == 1.0


def test_flexible_reads_the_last_number_only_where_asked():
    text = "First 3, then 10-3 = 7. The answer is $1,272."
    assert _score(GSM8K, text, "1272") == 0.0
    assert _score(GSM8K, text, "1272", flexible=True) == 1.0
    assert _score(GSM8K, "1272\n#### 5", "1272", flexible=True) == 0.0
    assert extract_gsm8k_answer("that makes 10-3", flexible=True) == "3"
    assert extract_gsm8k_answer("that makes -3", flexible=True) == "-3"
    assert extract_gsm8k_answer("no number", flexible=True) is None


def test_the_parsed_answer_is_reported():
    results = RewardManager(RewardConfig(processes=0)).score(
        [GSM8K, GSM8K], ["#### $1,000.", "none"], ["5", "5"]
    )
    assert [r.extra for r in results] == [{"answer": "1000"}, {"answer": None}]


def test_a_batch_may_mix_sources():
    results = RewardManager(RewardConfig(processes=0)).score(
        ["arithmetic", GSM8K, "arithmetic"], ["4", "#### 4", "#### 4"], ["4"] * 3
    )
    assert [r.score for r in results] == [1.0, 1.0, 0.0]


def test_an_unknown_source_lists_the_known_ones():
    manager = RewardManager(RewardConfig(processes=0))
    with pytest.raises(
        DataError,
        match=(
            r"row 1: no verifier for data_source 'gsm8k'.*known: .*apps, .*openai/gsm8k.*\); "
            r".*reward\.verifiers"
        ),
    ):
        manager.score(["arithmetic", "gsm8k"], ["1", "1"], ["1", "1"])
    with pytest.raises(DataError, match=r"did you mean arithmetic\?"):
        manager.check_data_sources(["arithmetic", "arithmetics"])
    known = by_data_source()
    manager.check_data_sources(source for source in known if known[source].requires is None)


@pytest.mark.parametrize("truth", ["many", True, None, [5]])
def test_a_ground_truth_the_verifier_cannot_use_is_named(truth):
    with pytest.raises(
        DataError, match="row 0: the verifier of data_source 'openai/gsm8k' cannot use ground truth"
    ):
        _score(GSM8K, "#### 5", truth)


def test_unknown_arguments_for_the_built_in_verifiers_are_refused():
    with pytest.raises(
        ConfigError, match=r"reward\.kwargs\.flexibel is not an option of any verifier .*flexible"
    ):
        RewardManager(RewardConfig(processes=0, kwargs={"flexibel": True}))


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="argument"):
        RewardManager(RewardConfig(processes=0)).score(["arithmetic"], ["1", "2"], ["1", "2"])


# --- the user's function


def test_a_custom_function_gets_all_arguments_by_name(tmp_path):
    code = """
        def compute_score(extra_info, ground_truth, solution_str, data_source, scale=1):
            return {"score": scale * len(solution_str), "seen": [data_source, ground_truth, extra_info["k"]]}
    """
    results = _custom(tmp_path, code, scale=0.5).score(
        ["a", "b"], ["xy", "xyz"], [1, 2], [{"k": 7}, {"k": 8}]
    )
    assert [(r.score, r.extra) for r in results] == [
        (1.0, {"seen": ["a", 1, 7]}),
        (1.5, {"seen": ["b", 2, 8]}),
    ]


@pytest.mark.parametrize(
    ("value", "score"),
    [("True", 1.0), ("3", 3.0), ("__import__('numpy').float32(0.5)", 0.5), ("{'score': -1}", -1.0)],
)
def test_what_counts_as_a_score(tmp_path, value, score):
    manager = _custom(
        tmp_path,
        f"def compute_score(data_source, solution_str, ground_truth, extra_info): return {value}",
    )
    result = manager.score(["a"], ["b"], ["c"])[0]
    assert (result.score, type(result.score)) == (score, float)


@pytest.mark.parametrize(
    "value", ["None", "'1'", "float('nan')", "float('inf')", "{}", "{'score': None}", "[1.0]"]
)
def test_anything_else_is_refused_with_file_function_and_row(tmp_path, value):
    code = f"""
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            return {value} if solution_str == "bad" else 1.0
    """
    with pytest.raises(
        DataError,
        match=(
            r"row 2: reward function compute_score of .*reward\.py returned .*expected a finite "
            r"number"
        ),
    ):
        _custom(tmp_path, code).score(["a"] * 3, ["ok", "ok", "bad"], ["c"] * 3)


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_an_error_in_user_code_is_reported_with_row_message_and_line(tmp_path, kind):
    code = f"""
        {kind} compute_score(data_source, solution_str, ground_truth, extra_info):
            return 1 / int(solution_str)
    """
    with pytest.raises(
        DataError,
        match=(
            r"row 1: reward function compute_score of .*reward\.py raised ZeroDivisionError: "
            r"division by zero "
            r"\(line 3\)"
        ),
    ):
        _custom(tmp_path, code).score(["a"] * 2, ["1", "0"], ["c"] * 2)


def test_async_calls_of_a_batch_run_together_and_keep_their_order(tmp_path):
    code = """
        import asyncio
        arrived = 0

        async def compute_score(data_source, solution_str, ground_truth, extra_info):
            global arrived
            arrived += 1
            while arrived < 3:  # would never end one after another
                await asyncio.sleep(0)
            return float(solution_str)
    """
    assert [
        r.score for r in _custom(tmp_path, code).score(["a"] * 3, ["3", "1", "2"], ["c"] * 3)
    ] == [3.0, 1.0, 2.0]


def test_a_function_cannot_spoil_the_dataset_through_extra_info(tmp_path):
    code = (
        "def compute_score(data_source, solution_str, ground_truth, extra_info): extra_info['k'] = "
        "0; return 1.0"
    )
    info = {"k": 1}
    _custom(tmp_path, code).score(["a"], ["b"], ["c"], [info])
    assert info == {"k": 1}


@pytest.mark.parametrize(
    ("code", "named"),
    [
        (
            "def compute_scores(): pass",
            r"\(reward\.name\): 'compute_score' is not a function; did you mean compute_scores",
        ),
        ("compute_score = 3", "'compute_score' is not a function"),
        (
            "def compute_score(data_source, text): pass",
            r"compute_score\(data_source, text\) cannot be called with",
        ),
        (
            "import no_such_module_here",
            r"could not be imported: ModuleNotFoundError: .* \(line 1\)",
        ),
        ("x = 1\ndef compute_score(:", r"could not be imported: SyntaxError: .*\(line 2\)"),
    ],
)
def test_a_function_that_cannot_be_used_is_reported_before_the_first_rollout(tmp_path, code, named):
    with pytest.raises(ConfigError, match=named):
        _custom(tmp_path, code)


def test_kwargs_the_function_does_not_take_are_reported(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be called with .*scale"):
        _custom(
            tmp_path,
            "def compute_score(data_source, solution_str, ground_truth, extra_info): pass",
            scale=2,
        )


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(ConfigError, match=r"reward\.path: .*nowhere.py' not found"):
        RewardManager(RewardConfig(processes=0, path=str(tmp_path / "nowhere.py")))


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_function_that_ends_the_process_is_reported_as_any_other_error(tmp_path, kind):
    code = f"""
        import sys

        {kind} compute_score(data_source, solution_str, ground_truth, extra_info):
            sys.exit(3) if solution_str == "bad" else None
            return 1.0
    """
    with pytest.raises(
        DataError, match=r"row 1: reward function .*raised SystemExit: 3 \(line 5\)"
    ):
        _custom(tmp_path, code).score(["a"] * 2, ["ok", "bad"], ["c"] * 2)


def test_a_file_that_ends_the_process_is_reported(tmp_path):
    with pytest.raises(ConfigError, match=r"could not be imported: SystemExit: 1 \(line 2\)"):
        _custom(tmp_path, "import sys\nsys.exit(1)")


VERIFIER_OF_MINE = """
    import sys
    from hybridflow.rewards.verifiers.base import verifier

    @verifier("upper", data_sources=["mine", "arithmetic"])
    def upper(response, ground_truth, *, partial=0.0):
        if response == "exit":
            sys.exit(1)
        return {"score": 1.0 if response == ground_truth.upper() else partial, "length": len(response)}
"""


def test_a_verifier_from_a_file_scores_the_rows_of_its_data_sources(tmp_path):
    """Rows of other sources keep the built-in verifier; reward.kwargs reach those that take
    them."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(VERIFIER_OF_MINE))
    manager = RewardManager(
        RewardConfig(
            processes=0, verifiers=(f"{tmp_path}/mine.py:upper",), kwargs={"partial": 0.25}
        )
    )
    manager.check_data_sources(["mine", GSM8K])
    found = manager.score(
        ["mine", GSM8K, "arithmetic"], ["YES", "#### 5", "no"], ["yes", "5", "no"]
    )
    assert [result.score for result in found] == [1.0, 1.0, 0.25]
    assert [result.extra for result in found] == [{"length": 3}, {"answer": "5"}, {"length": 2}]
    with pytest.raises(
        DataError, match=r"row 0: the verifier of data_source 'mine' .*SystemExit: 1 \(line 8\)"
    ):
        manager.score(["mine"], ["exit"], ["x"])
    assert (
        RewardManager(RewardConfig(processes=0)).score(["arithmetic"], ["no"], ["no"])[0].score
        == 1.0
    )


def test_a_verifier_that_a_file_lacks_is_named(tmp_path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(VERIFIER_OF_MINE))
    with pytest.raises(
        ConfigError,
        match=r"reward\.verifiers=.*does not register the verifier 'lower'; it registers: upper",
    ):
        RewardManager(RewardConfig(processes=0, verifiers=(f"{tmp_path}/mine.py:lower",)))
    with pytest.raises(ConfigError, match="does not register the verifier 'gsm8k'"):
        RewardManager(RewardConfig(processes=0, verifiers=(f"{tmp_path}/mine.py:gsm8k",)))


def test_two_files_of_one_name_do_not_meet(tmp_path):
    managers = []
    for value in (1, 2):
        (tmp_path / str(value)).mkdir()
        code = f"""
            import pickle

            class Thing:
                value = {value}

            def compute_score(data_source, solution_str, ground_truth, extra_info):
                return pickle.loads(pickle.dumps(Thing())).value  # looks its module up by name
        """
        managers.append(_custom(tmp_path / str(value), code))
    assert [m.score(["a"], ["b"], ["c"])[0].score for m in managers] == [1.0, 2.0]
