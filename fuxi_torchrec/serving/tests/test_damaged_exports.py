"""Exports that are damaged, of another version or no exports."""

from dataclasses import replace

import pytest

from fuxi_torchrec.export.bundle import INDEX, STATES, Bundle, ExportError
from fuxi_torchrec.export.parts import part_name
from fuxi_torchrec.serving.recommender import Recommender
from fuxi_torchrec.serving.tests.random_export import write_demo_export
from fuxi_torchrec.serving.tests.recommenders import DEMO, change_manifest


def test_an_export_of_another_version(export):
    change_manifest(export, version=1)
    with pytest.raises(ExportError, match="version 1, this software reads version 3; export again"):
        Recommender.load(export)


def test_something_that_is_no_export(tmp_path):
    with pytest.raises(ExportError, match="no export here"):
        Recommender.load(tmp_path)


@pytest.mark.parametrize(
    "name", ["users/part-00001.parquet", "items/part-00000.parquet", "tables.safetensors", "encoder.safetensors", INDEX]
)
def test_damaged_files_are_found_by_their_checksums(export, name):
    data = bytearray((export / name).read_bytes())
    data[40] ^= 1
    (export / name).write_bytes(data)
    with pytest.raises(ExportError, match=f"{name}(: damaged| has another checksum)"):
        Recommender.load(export)
    with pytest.raises(ExportError, match=f"{name}(: damaged| has another checksum)"):
        Bundle.open(export).check()
    (export / name).write_bytes(data[:-1])
    with pytest.raises(ExportError, match=f"{name} has {len(data) - 1} bytes where the manifest says {len(data)}"):
        Recommender.load(export)


def test_a_damaged_state_is_encoded_again(export):
    with Recommender.load(export) as recommender:
        before = recommender.recommend(range(12), recommender.manifest.as_of, 5)
    for number in range(3):
        path = export / part_name(STATES, number, "bin")
        data = bytearray(path.read_bytes())
        for at in range(4096 + 500, len(data), 700):
            data[at] ^= 1
        path.write_bytes(data)
    with Recommender.load(export) as recommender:
        after = recommender.recommend(range(12), recommender.manifest.as_of, 5)
        assert recommender.info()["damaged_states"] == Bundle.open(export).manifest.states > 3
    assert [answer.items for answer in after] == [answer.items for answer in before]


def test_states_of_another_model_are_refused(export, tmp_path):
    write_demo_export(tmp_path / "other", replace(DEMO, seed=5, histories=None))
    name = part_name(STATES, 0, "bin")
    data = bytearray((export / name).read_bytes())
    other = Bundle.open(tmp_path / "other").manifest.model_id.encode()
    mine = Bundle.open(export).manifest.model_id.encode()
    assert len(other) == len(mine)
    (export / name).write_bytes(bytes(data).replace(mine, other))
    with pytest.raises(ExportError, match="states of model"):
        Recommender.load(export)
