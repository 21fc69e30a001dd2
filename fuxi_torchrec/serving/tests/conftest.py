"""Small models on one thread: several would only wait for each other."""

import pytest
import torch

from fuxi_torchrec.serving.tests.random_export import write_demo_export
from fuxi_torchrec.serving.tests.recommenders import DEMO


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def export(tmp_path):
    write_demo_export(tmp_path / "x", DEMO)
    return tmp_path / "x"
