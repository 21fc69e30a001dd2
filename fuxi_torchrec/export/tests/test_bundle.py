"""An export whose files were changed is refused with the file's name, or answers as before: never otherwise."""

import json
import shutil
import stat
from dataclasses import replace

import numpy as np
import pytest

from fuxi_torchrec.export.bundle import ENCODER, INDEX, MANIFEST, TABLES, Bundle, ExportError
from fuxi_torchrec.schema import CHECKSUM, sealed
from fuxi_torchrec.serving.recommender import Recommender
from fuxi_torchrec.serving.tests.exports import FEATURES
from fuxi_torchrec.serving.tests.random_export import DemoExport, write_demo_export

USERS = 12
FLIPS = 8  # of each file


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("bundle") / "x"
    demo = DemoExport(items=40, users=USERS, features=FEATURES, text_features=("action",), state_min_events=5)
    write_demo_export(path, replace(demo, users_per_part=5))
    return path


@pytest.fixture
def export(original, tmp_path):
    shutil.copytree(original, tmp_path / "x")
    return tmp_path / "x"


def answers(path):
    with Recommender.load(path, read_only=True, warm_up=False) as recommender:
        found = recommender.recommend(range(USERS + 1), recommender.manifest.as_of, 5, exclude_seen=True)
    return [(answer.items, [round(float(score), 3) for score in answer.scores], answer.events) for answer in found]


def files(path):
    return sorted(str(each.relative_to(path)) for each in path.rglob("*") if each.is_file())


def test_a_flipped_bit_is_an_error_that_names_the_file_or_changes_nothing(original, tmp_path):
    expected, draw, unclear, refused = answers(original), np.random.default_rng(0), [], 0
    for name in files(original):
        size = (original / name).stat().st_size
        for bit in [3, 8 * size - 20, *draw.integers(0, 8 * size, FLIPS).tolist()]:
            shutil.copytree(original, tmp_path / "x")
            data = bytearray((original / name).read_bytes())
            data[bit // 8] ^= 1 << bit % 8
            (tmp_path / "x" / name).write_bytes(data)
            try:
                if answers(tmp_path / "x") != expected:
                    unclear.append(f"{name}: bit {bit}: other answers")
            except ExportError as error:
                refused += 1
                if name not in str(error):
                    unclear.append(f"{name}: bit {bit}: {error}")
            shutil.rmtree(tmp_path / "x")
    assert not unclear
    assert refused > 10 * FLIPS


def reseal(path, change):
    plain = json.loads((path / MANIFEST).read_text())
    del plain[CHECKSUM]
    change(plain)
    (path / MANIFEST).write_text(sealed(plain))


def edits(plain, at=()):
    """Every key of a JSON object gone, and with values of other kinds."""
    for key, value in plain.items() if isinstance(plain, dict) else enumerate(plain):
        yield *at, key
        if isinstance(value, dict | list):
            yield from edits(value, (*at, key))


GONE = object()
VALUES = [GONE, None, -1, 0, 1.5, 2**70, "word", "", [], {}, True, float("nan"), {"a": 1}]


def test_an_edited_manifest_is_an_error_that_names_it_or_an_export(original, tmp_path):
    plain = json.loads((original / MANIFEST).read_text())
    del plain[CHECKSUM], plain["rules"]
    names = [name for name in plain["files"] if name.startswith(("users", "index"))][:2]
    plain["files"] = {name: plain["files"][name] for name in names}
    shutil.copytree(original, tmp_path / "x")
    tried, unclear = 0, []
    for path in edits(plain):
        for value in VALUES:

            def change(whole, path=path, value=value):
                *outer, last = path
                for key in outer:
                    whole = whole[key]
                if value is GONE:
                    del whole[last]
                else:
                    whole[last] = value

            shutil.copy(original / MANIFEST, tmp_path / "x")
            reseal(tmp_path / "x", change)
            tried += 1
            try:
                bundle = Bundle.open(tmp_path / "x")
                bundle.encoder()
            except ExportError as error:
                if not any(name in str(error) for name in (MANIFEST, "part-", INDEX)):
                    unclear.append((path, value, error))
    assert tried > 500
    assert not unclear


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("similarity", "manhattan", "similarity = 'manhattan': should be 'cosine' or 'dot'"),
        ("temperature", float("inf"), "temperature must be a positive number"),
        ("temperature", 0.0, "temperature must be a positive number"),
        ("dimension", 7, "dimension 7 is not model.dim"),
        ("states", 10**6, "1000000 states of 12 users"),
        ("item_id_type", "float", "item_id_type = 'float'"),
        ("as_of", 2**63, "as_of"),
        ("max_length", 0, "max_length must be at least 1"),
    ],
)
def test_values_that_cannot_be_are_refused(export, key, value, words):
    reseal(export, lambda plain: plain.update({key: value}))
    with pytest.raises(ExportError, match=words):
        Bundle.open(export)


def test_a_manifest_that_was_edited_and_not_sealed_is_refused(export):
    text = (export / MANIFEST).read_text()
    (export / MANIFEST).write_text(text.replace('"temperature": 0.', '"temperature": 1.'))
    assert (export / MANIFEST).read_text() != text
    with pytest.raises(ExportError, match=r"manifest.json: damaged, or changed since it was written"):
        Bundle.open(export)


@pytest.mark.parametrize("name", ["../outside.txt", "/etc/passwd", "items/../../outside.txt", "a.txt", "users/part-x"])
def test_a_file_outside_of_the_export_is_not_touched(export, name):
    (export.parent / "outside.txt").write_text("mine")
    reseal(export, lambda plain: plain["files"].update({name: {"size": 4, "crc32": 0}}))
    with pytest.raises(ExportError, match="is no file of an export"):
        Bundle.open(export)


def test_a_link_out_of_the_export_is_refused(export):
    (export / TABLES).rename(export.parent / "tables")
    (export / TABLES).symlink_to(export.parent / "tables")
    with pytest.raises(ExportError, match=r"'tables.safetensors' is outside of the directory"):
        Bundle.open(export)


def test_sizes_alone_are_checked_on_request(export):
    data = bytearray((export / INDEX).read_bytes())
    data[-1] ^= 1
    (export / INDEX).write_bytes(data)
    assert Bundle.open(export, "sizes").file(INDEX).exists()
    with pytest.raises(ExportError, match=r"index.faiss has another checksum"):
        Bundle.open(export).file(INDEX)


def test_all_files_of_an_export_have_the_mode_of_new_files(tmp_path):
    from safetensors.torch import save_file
    from torch import zeros

    from fuxi_torchrec.artifacts import follow_umask

    save_file({"x": zeros(3)}, tmp_path / ENCODER)
    follow_umask(tmp_path / ENCODER)
    (tmp_path / "other").touch()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1 and len(list(tmp_path.iterdir())) == 2
