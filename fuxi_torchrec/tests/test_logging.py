import io
import re

import pytest

from fuxi_torchrec.logging import get_logger, setup_logging


@pytest.fixture(autouse=True)
def _restore_logger():
    logger = get_logger()
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before


def said(monkeypatch, rank, world_size, level="info"):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    stream = io.StringIO()
    setup_logging(level, stream)
    logger = get_logger("fuxi_torchrec.data.reader")
    logger.debug("details")
    logger.info("read 3 files")
    logger.warning("slow disk")
    return stream.getvalue()


def test_rank_zero_speaks_in_short_lines(monkeypatch):
    first, second = said(monkeypatch, 0, 2).splitlines()
    assert re.fullmatch(r"\d\d-\d\d \d\d:\d\d:\d\d read 3 files", first)
    assert second.endswith(" WARNING rank 0/2: slow disk")


def test_other_ranks_only_warn(monkeypatch):
    text = said(monkeypatch, 1, 2)
    assert "read 3 files" not in text
    assert "WARNING rank 1/2: slow disk" in text


def test_a_single_process_has_no_rank_in_its_lines_and_details_name_the_module(monkeypatch):
    text = said(monkeypatch, 0, 1, "debug")
    assert "INFO fuxi_torchrec.data.reader: read 3 files" in text
    assert "details" in text


def test_setting_up_twice_says_things_once(monkeypatch):
    said(monkeypatch, 0, 1)
    assert said(monkeypatch, 0, 1).count("slow disk") == 1


def test_an_unknown_level_is_named():
    with pytest.raises(ValueError, match="must be one of debug, info, warning, error, not 'loud'"):
        setup_logging("loud")
