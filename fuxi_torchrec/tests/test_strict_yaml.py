from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuxi_torchrec import strict_yaml
from fuxi_torchrec.strict_yaml import ConfigError


@dataclass(frozen=True)
class Optimizer:
    lr: float = field(default=1e-3, metadata={"help": "step size"})
    betas: tuple[float, float] = (0.9, 0.98)
    kind: Literal["adamw", "adagrad"] = "adamw"

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr must be positive, not {self.lr}")


@dataclass(frozen=True)
class Experiment:
    name: str = "run"
    steps: int | None = None
    compile: bool = False
    periods: tuple[int, ...] = (3600, 86400)
    optimizer: Optimizer = field(default_factory=Optimizer)


def load_text(tmp_path, text, *overrides):
    path = tmp_path / "exp.yaml"
    path.write_text(text)
    return strict_yaml.load(Experiment, path, overrides)


def test_defaults_then_file_then_overrides(tmp_path):
    config = load_text(tmp_path, "name: a\noptimizer:\n  lr: 1e-2\n", "optimizer.kind=adagrad", "name=b")
    assert config == Experiment(name="b", optimizer=Optimizer(lr=0.01, kind="adagrad"))


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("1", 1.0), ("5E+2", 500.0), (".5", 0.5), ("-.inf", -float("inf"))],
)
def test_numbers_are_read_as_people_write_them(text, value):
    if value > 0:
        assert strict_yaml.load(Experiment, overrides=[f"optimizer.lr={text}"]).optimizer.lr == value
    else:
        with pytest.raises(ConfigError, match="must be positive"):
            strict_yaml.load(Experiment, overrides=[f"optimizer.lr={text}"])


@pytest.mark.parametrize("word", ["no", "on", "12:30", "2020-01-01", "y"])
def test_words_stay_words(word):
    assert strict_yaml.load(Experiment, overrides=[f"name={word}"]).name == word


def test_leading_zero_is_decimal_and_hexadecimal_is_read():
    assert strict_yaml.load(Experiment, overrides=["steps=010"]).steps == 10
    assert strict_yaml.load(Experiment, overrides=["steps=0x10"]).steps == 16


def test_lists_become_tuples_and_a_whole_section_can_be_given_inline():
    config = strict_yaml.load(Experiment, overrides=["periods=[60, 3600]", "optimizer={lr: 0.5, kind: adagrad}"])
    assert config.periods == (60, 3600)
    assert config.optimizer == Optimizer(lr=0.5, kind="adagrad")


def test_an_empty_section_and_an_empty_file_mean_defaults(tmp_path):
    assert load_text(tmp_path, "optimizer:\n") == Experiment()
    assert load_text(tmp_path, "# nothing\n") == Experiment()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nmae: x", "exp.yaml:1: unknown key nmae; did you mean name?"),
        ("name: x\noptimizer:\n  l_r: 1", "exp.yaml:3: unknown key optimizer.l_r; did you mean optimizer.lr?"),
        ("lr: 1", "exp.yaml:1: unknown key lr; did you mean optimizer.lr?"),
        ("zebra: 1", "exp.yaml:1: unknown key zebra; known here: name, steps, compile, periods, optimizer"),
        ("name: 3", "exp.yaml:1: name = 3: should be a valid string"),
        ("steps: '3'", "exp.yaml:1: steps = '3': should be a valid integer"),
        ("steps: 3.0", "exp.yaml:1: steps = 3.0: should be a valid integer"),
        ("compile: 1", "exp.yaml:1: compile = 1: should be a valid boolean"),
        ("name: a\nperiods: [1, x]", "exp.yaml:2: periods = [1, 'x']: item 1: should be a valid integer"),
        ("optimizer:\n  kind: sgd", "exp.yaml:2: optimizer.kind = 'sgd': should be 'adamw' or 'adagrad'"),
        ("optimizer: 3", "exp.yaml:1: optimizer = 3: "),
        ("optimizer:\n  lr: -1", "exp.yaml: optimizer: lr must be positive, not -1.0"),
        ("name: a\nname: b", "exp.yaml:2: name is given twice"),
        ("name: [", "exp.yaml:1: not valid YAML: "),
        ("- a\n- b", "exp.yaml: a config is a mapping of keys to values, this is a list"),
    ],
)
def test_what_does_not_fit_is_named_with_file_line_key_and_value(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: &a [*a]", "exp.yaml:1: not valid YAML: anchors and aliases"),
        ("name: a\noptimizer: &a\n  lr: *a", "exp.yaml:2: not valid YAML: anchors and aliases"),
        ("name:\n  " + "[" * 5000, "exp.yaml:2: not valid YAML: nested more than 20 deep"),
        ("name: " + "{a: " * 5000, "exp.yaml:1: not valid YAML: nested more than 20 deep"),
        ("name: a\nsteps: " + "1" * 5000, "exp.yaml:2: not valid YAML: a number of 5000 digits"),
        ("periods:\n- 0x" + "f" * 5000, "exp.yaml:2: not valid YAML: a number of 5002 digits"),
        (
            "name: !!python/name:os.system",
            "exp.yaml:1: not valid YAML: the tag tag:yaml.org,2002:python/name:os.system",
        ),
        ("name: a\nsteps: !!int x", "exp.yaml:2: not valid YAML: invalid literal for int()"),
        ("steps: !!bool x", "exp.yaml:1: not valid YAML: "),
        ("name: a\n? [a, b]\n: 3", "exp.yaml:2: a key is a word, not a list or a mapping"),
        ("periods:\n- {[1]: 2}", "exp.yaml:2: not valid YAML: found unhashable key"),
        ("name: a\n" * 100_000, "exp.yaml: more than 262144 characters"),
        ("name: \x07", "exp.yaml: not valid YAML: "),
    ],
)
def test_what_would_break_a_reader_of_yaml_is_refused_with_file_and_line(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("line", ["key{}: 1", "'{}': 1"])
def test_of_very_many_problems_some_are_listed(tmp_path, line):
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, "\n".join(line.format(number) for number in range(15_000)))
    lines = str(caught.value).splitlines()
    assert len(lines) == 21 and lines[-1] == "... and more"
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, f"periods: [{', '.join(['x'] * 5000)}]")
    assert len(str(caught.value).splitlines()) == 21
    assert len(str(caught.value)) < 5000


def test_every_problem_is_listed_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, "name: 3\nsteps: many\n")
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("name", "'name' is not of the form key.sub=value"),
        ("=3", "'=3' is not of the form key.sub=value"),
        ("steps=many", "command line: steps = 'many': should be a valid integer"),
        ("optimizer.kin=adamw", "command line: unknown key optimizer.kin; did you mean optimizer.kind?"),
        ("name.first=a", "command line: name.first is set, but name is no section"),
    ],
)
def test_bad_overrides_are_named(override, message):
    with pytest.raises(ConfigError) as caught:
        strict_yaml.load(Experiment, overrides=[override])
    assert message in str(caught.value)


def test_an_unreadable_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot read the config: No such file"):
        strict_yaml.load(Experiment, tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="it is not UTF-8 text"):
        strict_yaml.load(Experiment, tmp_path / "binary.yaml")


@given(
    st.builds(
        Experiment,
        name=st.text(st.characters(codec="utf-8", exclude_categories=["Cs"])),
        steps=st.none() | st.integers(),
        compile=st.booleans(),
        periods=st.lists(st.integers()).map(tuple),
        optimizer=st.builds(
            Optimizer,
            lr=st.floats(min_value=1e-300, allow_nan=False),
            betas=st.tuples(st.floats(allow_nan=False), st.floats(allow_nan=False)),
            kind=st.sampled_from(["adamw", "adagrad"]),
        ),
    )
)
def test_round_trip_through_yaml(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    path.write_text(strict_yaml.dump(config))
    assert strict_yaml.load(Experiment, path) == config


def test_dump_shows_help_beside_the_value():
    assert "  lr: 0.001  # step size\n" in strict_yaml.dump(Experiment())
