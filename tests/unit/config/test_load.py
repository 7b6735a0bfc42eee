"""Recipes and overrides become typed dataclasses; whatever is wrong is named by its full key."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hybridflow.config.build import build, to_plain
from hybridflow.config.keys import all_keys, value_at
from hybridflow.config.load import dump_yaml, load_config
from hybridflow.config.locate import list_recipes, shipped_config_dir
from hybridflow.config.schema import RunConfig
from hybridflow.errors import ConfigError

KEYS = dict(all_keys(RunConfig))
CHOICES = {key: kind.choices for key, kind in KEYS.items() if kind.choices}
RECIPES = {recipe.name: recipe.summary for recipe in list_recipes([shipped_config_dir()])}


def message(*overrides: str, name: str = "e2e", config_dir: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(name, overrides, config_dir)
    return str(caught.value)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder of one's own, with a name that needs quoting."""
    folder = tmp_path / "it's mine, really"
    folder.mkdir()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_loads_and_says_what_it_is(recipe: str) -> None:
    config = load_config(recipe)
    assert config.name == recipe
    assert RECIPES[recipe]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tiny-moe-grpo", "tiny-moe-ppo", "tiny-code-grpo"])
def test_a_recipe_leaves_out_its_warm_start_when_it_is_told_to(recipe: str) -> None:
    """Steps that a recipe sets beside its group would stay."""
    assert load_config(recipe).sft.steps > 0
    assert load_config(recipe, ["sft=none"]).sft.steps == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "group",
    sorted(path for path in shipped_config_dir().iterdir() if path.is_dir()),
    ids=lambda path: path.name,
)
def test_every_group_file_can_be_chosen(group: Path) -> None:
    fills = [
        "model.path=somewhere",
        "reward.path=somewhere",
        "data.train_files=[a]",
        "data.prepare.out=x",
    ]
    for file in sorted(group.glob("*.yaml")):
        if group.name == "published":  # it fills several sections, those of a recipe of a size
            assert (
                load_config("grpo-qwen3-8b-1x8", [f"published={file.stem}"]).actor.optim.lr < 1e-4
            )
            continue
        if group.name == "scale":  # it comes last, over what a recipe sets
            assert load_config("grpo-qwen3-8b-1x8", [f"+scale={file.stem}"]).rollout.tensor == 1
            continue
        config = load_config("e2e", [f"{group.name}={file.stem}", *fills])
        assert dataclasses.is_dataclass(getattr(config, group.name))


@pytest.mark.slow
@pytest.mark.parametrize("section", sorted({key.partition(".")[0] for key in KEYS}))
def test_every_key_can_be_overridden_on_a_recipe_that_mentions_none(
    section: str, own: Path
) -> None:
    (own / "empty.yaml").write_text("# nothing\n{}\n")
    plain = to_plain(RunConfig())
    given = {key: another(key, at(plain, key)) for key in KEYS if key.partition(".")[0] == section}
    found = to_plain(
        load_config("empty", [f"{key}={text}" for key, (text, _) in given.items()], own)
    )
    for key, (_, expected) in given.items():
        value = at(found, key)
        default = at(plain, key)
        assert value == expected, key
        assert type(value) is type(default) or default is None, key


def at(plain: object, key: str) -> object:
    """The value of a key in nested mappings."""
    for part in key.split("."):
        plain = plain[part]  # type: ignore[index]
    return plain


def another(key: str, value: object) -> tuple[str, object]:
    """A value of the key's kind that is not its default where there is one: as an override writes
    it, and itself."""
    if isinstance(value, bool):
        return str(not value).lower(), not value
    if isinstance(value, (int, float)):
        return "3", 3
    if isinstance(value, dict):  # roles: the names of groups of keys
        return ("{}", {}) if key == "roles" else ("{a: 1}", {"a": 1})
    if isinstance(value, list):
        return "[]", []
    if key in CHOICES:
        return str(CHOICES[key][-1]), CHOICES[key][-1]
    return ("null", None) if value is None else ("abc", "abc")


@pytest.mark.slow
def test_overrides_win_over_the_recipe_and_the_rest_keeps_its_value() -> None:
    plain = load_config("e2e")
    changed = load_config("e2e", ["actor.optim.lr=5e-4", "trainer.total_steps=3"])
    assert changed.actor.optim.lr == 5e-4
    assert changed.trainer.total_steps == 3
    assert dataclasses.replace(changed, actor=plain.actor, trainer=plain.trainer) == plain


@pytest.mark.slow
def test_a_group_choice_works_whether_or_not_the_recipe_names_the_group(own: Path) -> None:
    assert not load_config("e2e", ["algorithm=dr-grpo"]).algorithm.norm_adv_by_std
    (own / "bare.yaml").write_text("name: bare\n")
    config = load_config(
        "bare", ["algorithm=dr-grpo", "trainer=smoke", "trainer.total_steps=7"], own
    )
    assert not config.algorithm.norm_adv_by_std
    assert config.trainer.total_steps == 7


def test_defaults_of_a_group_survive_a_partial_override() -> None:
    """sft.optim and rollout.val_sampling have other defaults than their classes."""
    config = build(
        {"sft": {"optim": {"weight_decay": 0.5}}, "rollout": {"val_sampling": {"top_p": 0.5}}}
    )
    assert (config.sft.optim.lr, config.sft.optim.weight_decay) == (1e-3, 0.5)
    assert (config.rollout.val_sampling.temperature, config.rollout.val_sampling.top_p) == (
        0.0,
        0.5,
    )


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("actor.optim.lrr=1", "actor.optim.lr"),
        ("trainer.total_step=1", "trainer.total_steps"),
        ("roll0ut.n=1", "rollout"),
        ("total_steps=1", "trainer.total_steps"),
        ("+actor.ppo_mini_batch=1", "actor.ppo_mini_batch_size"),
    ],
)
def test_an_unknown_override_names_the_key_and_the_nearest_one(override: str, nearest: str) -> None:
    text = message(override)
    assert override.lstrip("+").split("=")[0] in text
    assert f"did you mean {nearest}?" in text


def test_an_unknown_key_in_a_yaml_gets_the_same_message(own: Path) -> None:
    (own / "mine.yaml").write_text(
        "defaults: [e2e, _self_]\nactor:\n  optim:\n    wieght_decay: 1.0\n"
    )
    assert (
        "unknown key actor.optim.wieght_decay; did you mean actor.optim.weight_decay?"
        in message(name="mine", config_dir=own)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("trainer.total_steps=three", ("trainer.total_steps", "'three'", "whole number")),
        ("trainer.total_steps=1.5", ("1.5", "whole number")),
        ("trainer.total_steps=true", ("True", "whole number")),
        ("data.train_batch_size=null", ("None", "whole number")),
        ("actor.optim.lr=fast", ("actor.optim.lr", "'fast'", "number")),
        ("actor.optim.lr=false", ("False", "number")),
        ("trainer.report=1", ("trainer.report", "1", "true/false")),
        ("name=7", ("name: got 7", "string", "quote it")),
        (
            "data.train_files=a.parquet",
            ("data.train_files", "list of strings", "data.train_files=[a.parquet]"),
        ),
        ("data.train_files=[1]", ("data.train_files[0]", "string")),
        ("model.hf_config=3", ("model.hf_config", "mapping")),
        ("actor.optim=3", ("actor.optim", "group of keys")),
        ("name.first=3", ("name.first", "single value")),
        ("actor.clip_ratio_c=x", ("actor.clip_ratio_c", "number or null")),
    ],
)
def test_a_wrong_type_names_key_value_and_expected_type(
    override: str, parts: tuple[str, ...]
) -> None:
    text = message(override)
    assert [part for part in parts if part not in text] == []


@pytest.mark.slow
@pytest.mark.parametrize("key", sorted(CHOICES))
def test_choice_fields_list_their_choices(key: str) -> None:
    is_list = isinstance(value_at(RunConfig(), key), tuple)
    text = message(f"{key}={'[nonsense]' if is_list else 'nonsense'}")
    assert "'nonsense'" in text
    assert all(choice in text for choice in CHOICES[key])


def test_every_default_is_allowed() -> None:
    assert build(to_plain(RunConfig())) == RunConfig()


@pytest.mark.parametrize(
    "override",
    [
        "no-equals-sign",
        "a b=1",
        "trainer.total_steps=1,2",
        "hydra.run.dir=x",
        "algorithm=nope",
        "trainer=3",
        "name=${oops}",
    ],
)
def test_bad_overrides_are_config_errors_that_name_the_override(override: str) -> None:
    groups = "choose one of: demo, demo-short, long, smoke"
    named = {"trainer=3": groups, "name=${oops}": "oops", "algorithm=nope": "algorithm/nope"}
    assert named.get(override, override) in message(override)


def test_an_unknown_group_choice_lists_the_choices() -> None:
    text = message("algorithm=gpro")
    assert "grpo" in text
    assert "dr-grpo" in text


def test_an_unknown_recipe_lists_those_that_exist(own: Path) -> None:
    (own / "mine.yaml").write_text("name: mine\n")
    text = message(name="tiny-moe-grop", config_dir=own)
    assert "did you mean tiny-moe-grpo?" in text
    assert all(name in text for name in ("e2e", "gsm8k-smoke", "mine"))


@pytest.mark.slow
def test_a_part_of_a_recipes_name_lists_the_recipes_that_have_it() -> None:
    found = message(name="qwen3-235b")
    alike = "grpo-qwen3-235b-a22b-16x8, grpo-qwen3-235b-a22b-32x8"
    assert f"qwen3-235b not found; did you mean one of {alike}" in found
    assert "tiny-moe-grpo" not in found


def test_a_missing_mandatory_value_says_what_to_give() -> None:
    assert "set model.path=..." in message("model=folder")


def test_a_bad_yaml_is_reported_with_file_and_line(own: Path) -> None:
    (own / "bad.yaml").write_text("# bad\nname: x\nactor: {optim: [\n")
    text = message(name="bad", config_dir=own)
    assert str(own / "bad.yaml") in text
    assert "line 4" in text


def test_own_recipes_hide_shipped_ones_and_may_use_shipped_groups(own: Path) -> None:
    (own / "e2e.yaml").write_text("defaults:\n  - algorithm: dr-grpo\n  - _self_\nname: own\n")
    config = load_config("e2e.yaml", config_dir=own)
    assert config.name == "own"
    assert not config.algorithm.norm_adv_by_std


@pytest.mark.slow
def test_own_group_files_replace_shipped_ones_under_a_shipped_recipe(own: Path) -> None:
    (own / "trainer").mkdir()
    (own / "trainer" / "smoke.yaml").write_text("total_steps: 17\n")
    (own / "trainer" / "long.yaml").write_text("total_steps: 99\n")
    assert load_config("e2e", config_dir=own).trainer.total_steps == 17
    assert load_config("e2e", ["trainer=long"], own).trainer.total_steps == 99
    assert load_config("e2e").trainer.total_steps == 2


def test_a_missing_config_dir_is_named(own: Path) -> None:
    assert "nowhere" in message(config_dir=own / "nowhere")


@pytest.mark.slow
def test_interpolation_may_name_a_key_that_no_yaml_mentions(own: Path) -> None:
    (own / "bare.yaml").write_text(
        "name: bare\nactor:\n  ppo_mini_batch_size: ${data.train_batch_size}\n"
    )
    assert load_config("bare", ["data.train_batch_size=24"], own).actor.ppo_mini_batch_size == 24
    assert (
        load_config("bare", [], own).actor.ppo_mini_batch_size == RunConfig().data.train_batch_size
    )


@pytest.mark.slow
def test_the_dump_reads_back_to_an_equal_configuration(tmp_path: Path) -> None:
    config = load_config(
        "tiny-moe-grpo",
        ["rollout.logprob_diff_bound=null", "actor.optim.adam_eps=1e-8", 'name="007"'],
    )
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert load_config("config", (), tmp_path) == config


def test_loading_leaves_the_working_directory_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    load_config("e2e", ["trainer.total_steps=3"])
    assert Path.cwd() == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_the_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config("e2e").actor.ppo_mini_batch_size = 1  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"- a\n- b\n", r"mine\.yaml is a list; a recipe is a mapping of keys"),
        (b"5\n", r"mine\.yaml is a single value"),
        (b"name: caf\xe9\n", r"mine\.yaml: byte 9 \(0xe9\) is not UTF-8; save the file as UTF-8"),
        ("name: x\n".encode("utf-16"), r"mine\.yaml: byte 0 \(0xff\) is not UTF-8"),
        (b"defaults: [mine, _self_]\n", "circular defaults lists"),
        (b"defaults: {e2e: 1}\n", "recipe mine: .*defaults"),
        (
            b"defaults: [e2e, {algorithm: odd}, _self_]\n",
            r"recipe mine: Multiple values for algorithm",
        ),
        (
            b"defaults: [{algorithm: odd}, _self_]\n",
            r"algorithm: got \['x'\], expected a group of keys",
        ),
        (
            b"defaults: [{algorithm: latin}, _self_]\n",
            r"algorithm/latin\.yaml: byte \d+ \(0xe9\) is not UTF-8",
        ),
        (b"\xef\xbb\xbfdefaults: [e2e, _self_]\nname: x\n", None),
    ],
)
def test_a_file_that_is_no_recipe_is_named(
    tmp_path: Path, content: bytes, expected: str | None
) -> None:
    """A folder of such a name is none either, and others of the folder are not blamed."""
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "odd.yaml").write_text("- x\n")
    (tmp_path / "algorithm" / "latin.yaml").write_bytes(b"# caf\xe9\n")
    (tmp_path / "mine.yaml").write_bytes(content)
    if expected is None:
        assert load_config("mine", [], tmp_path).name == "x"
    else:
        with pytest.raises(ConfigError, match=expected):
            load_config("mine", [], tmp_path)
