from fuxi_torchrec import config, strict_yaml


def all_keys(node, prefix=""):
    for key, value in node.items():
        yield from all_keys(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]


def test_the_keys_are_frozen():
    """Adding a key is an addition here too; renaming or removing one breaks somebody's file."""
    assert set(all_keys(strict_yaml.to_dict(config.Config()))) == {
        "seed",
        "distributed.device",
        "distributed.timeout_seconds",
        "logging.level",
    }


def test_the_command_prints_every_default_and_reads_it_back(capsys, tmp_path):
    assert config.main([]) == 0
    text = capsys.readouterr().out
    (tmp_path / "all.yaml").write_text(text)
    assert config.load_config(tmp_path / "all.yaml") == config.Config()
    assert config.main([str(tmp_path / "all.yaml"), "seed=9"]) == 0
    assert "seed: 9" in capsys.readouterr().out


def test_the_command_reports_bad_settings(capsys):
    assert config.main(["distributed.timeout_seconds=-1"]) == 1
    assert "timeout_seconds must be positive, not -1" in capsys.readouterr().err
