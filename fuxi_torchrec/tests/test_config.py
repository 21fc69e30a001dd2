import pytest

from fuxi_torchrec import FuXiLinearConfig, config, strict_yaml
from fuxi_torchrec.encoders.tests import causal_mean


def printed(arguments):
    return strict_yaml.print_main(config.Config, "config", arguments)


def all_keys(node, prefix=""):
    for key, value in node.items():
        yield from all_keys(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [prefix + key]


def test_the_keys_are_frozen():
    """Adding a key is an addition here too; renaming or removing one breaks somebody's file."""
    frozen = {
        "": "seed",
        "data": "path time_unit split fit_on_valid valid_from test_from min_item_events oov_rate on_bad_rows "
        "num_workers cache_mib",
        "batch": "events users max_length truncation streams shuffle_blocks max_events_per_rank",
        "model": "kind dim num_layers num_heads max_positions temporal_periods kernel_dim ffn_dim dropout preset "
        "use_retention use_positional use_temporal temporal positional temporal_phases temporal_mix temporal_half_life "
        "learn_temporal_decay activation_checkpointing retention_chunk positional_chunk temporal_chunk",
        "tables": "init_std sharding",
        "features": "event item user id_dropout",
        "task": "kind repeats.window repeats.periods repeats.at_last repeats.without",
        "loss": "negatives num_negatives similarity temperature weighting same_time",
        "optimizer": "kind lr table_lr scalar_lr betas eps weight_decay clip_norm warmup_steps "
        "lr_schedule decay_steps min_lr_factor",
        "train": "epochs max_steps precision pipeline",
        "validation": "every_epochs users metric patience filter_seen",
        "checkpoint": "every_steps keep_last async_save",
        "distributed": "device timeout_seconds",
        "logging": "level every_steps tensorboard",
    }
    expected = {f"{section}.{key}".lstrip(".") for section, keys in frozen.items() for key in keys.split()}
    assert set(all_keys(strict_yaml.to_dict(config.Config()))) == expected


def test_the_command_prints_every_default_and_reads_it_back(capsys, tmp_path):
    assert printed([]) == 0
    text = capsys.readouterr().out
    (tmp_path / "all.yaml").write_text(text)
    assert config.load_config(tmp_path / "all.yaml") == config.Config()
    assert printed([str(tmp_path / "all.yaml"), "seed=9"]) == 0
    assert "seed: 9" in capsys.readouterr().out


def test_the_command_reports_bad_settings(capsys):
    assert printed(["distributed.timeout_seconds=-1"]) == 1
    assert "timeout_seconds must be positive, not -1" in capsys.readouterr().err


@pytest.mark.parametrize("written", ["{action: }", "{action: null, tags: {pooling: mean}}", "{action: {}}"])
def test_a_feature_without_settings_has_the_defaults(written):
    features = config.load_config(overrides=[f"features.event={written}"]).features.event
    assert features["action"] == config.FeatureConfig()


FLOATS = "optimizer.lr optimizer.weight_decay loss.temperature validation.every_epochs distributed.timeout_seconds"


@pytest.mark.parametrize("key", FLOATS.split())
@pytest.mark.parametrize("value", [".nan", ".inf"])
def test_numbers_that_are_none_are_refused(key, value):
    with pytest.raises(strict_yaml.ConfigError, match=key.partition(".")[2]):
        config.load_config(None, [f"{key}={value}"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("batch.streams=2147483648", "streams must be at most 16384, not 2147483648"),
        ("batch.events=10000000000000", "events must be at most 4294967296"),
        (f"model.dim={10**24}", "model: dim must be at most 268435456"),
        ("model.num_layers=100000", "model: num_layers must be at most 1024"),
        ("loss.num_negatives=99999999999", "num_negatives must be at most"),
        ("distributed.timeout_seconds=1e300", "timeout_seconds must be at most"),
    ],
)
def test_sizes_that_no_machine_has_are_refused(setting, message):
    with pytest.raises(strict_yaml.ConfigError) as refused:
        config.load_config(None, [setting])
    assert message in str(refused.value)


def test_times_may_be_iso_dates():
    by_time = ["data.split=by_time", "data.time_unit=ms"]
    data = config.load_config(
        None, [*by_time, "data.valid_from=1970-01-02", "data.test_from='1970-01-02T00:00:01'"]
    ).data
    assert (data.valid_from, data.test_from) == (86_400_000, 86_401_000)
    assert data == config.load_config(None, [*by_time, "data.valid_from=86400000", "data.test_from=86401000"]).data
    with pytest.raises(
        strict_yaml.ConfigError, match="data: 'May' is no time: give a number in milliseconds since 1970"
    ):
        config.load_config(None, [*by_time, "data.test_from=May"])


def test_a_model_has_the_keys_of_its_kind(tmp_path):
    own = f"model.kind={causal_mean.KIND}"
    loaded = config.load_config(None, [own, "model.per_day=0.25"])
    assert loaded.model == causal_mean.CausalMeanConfig(per_day=0.25)
    (tmp_path / "own.yaml").write_text(strict_yaml.dump(loaded))
    assert "\nmodel:\n  kind: " in strict_yaml.dump(loaded)
    assert config.load_config(tmp_path / "own.yaml") == loaded
    assert config.load_config(overrides=["model={dim: 32}"]).model == FuXiLinearConfig(dim=32)
    (difference, *_) = [d for d in config.differences(config.Config(), loaded) if d.key == "model.kind"]
    assert (difference.old, difference.operational) == ("fuxi_linear", False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model:\n  kind: hstuu\n", "x.yaml:2: model.kind = 'hstuu': unknown encoder 'hstuu': known are fuxi_linear"),
        ("model:\n  kind: 7\n", "x.yaml:2: model.kind = 7: should be a valid string"),
        ("model:\n  kind: os:system\n", "x.yaml:2: model.kind = 'os:system': 'os:system' is no SequenceEncoder"),
        ("model:\n  kind: no.module:X\n", "x.yaml:2: model.kind = 'no.module:X': the encoder 'no.module:X' cannot be"),
        ("model:\n  dimm: 8\n", "x.yaml:2: unknown key model.dimm; did you mean model.dim?"),
        (
            f"model:\n  kind: {causal_mean.KIND}\n  pr_day: 1\n",
            "x.yaml:3: unknown key model.pr_day; did you mean model.per_day",
        ),
        (f"model:\n  kind: {causal_mean.KIND}\n  num_heads: 4\n", "x.yaml:3: unknown key model.num_heads; "),
        ("model:\n  temporal_periods: []\n", "temporal_periods is empty"),
    ],
)
def test_what_is_no_setting_of_the_kind_is_refused_with_its_line(tmp_path, text, message):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(strict_yaml.ConfigError) as caught:
        config.load_config(tmp_path / "x.yaml")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("line", "key", "known"),
    [
        ("task: {kind: next_itme}", "task.kind = 'next_itme'", ["'next_item'"]),
        ("loss: {negatives: hard}", "loss.negatives = 'hard'", ["'shared'", "'uniform'", "'full'", "'in_batch'"]),
    ],
)
def test_an_unknown_task_or_sampler_names_the_known_ones(tmp_path, line, key, known):
    (tmp_path / "a.yaml").write_text(f"seed: 1\n{line}\n")
    with pytest.raises(strict_yaml.ConfigError) as refused:
        config.load_config(tmp_path / "a.yaml")
    assert f"a.yaml:2: {key}: should be " in str(refused.value)
    assert all(name in str(refused.value) for name in known)
