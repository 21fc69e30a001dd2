"""Scores with a bias for items of users' windows: the best k are exact, and so is everything that leads to them."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fuxi_torchrec.export.bundle import INDEX, REPEATS, STATES, Bundle, ExportError, describe_file
from fuxi_torchrec.serving.catalogue import Catalogue
from fuxi_torchrec.serving.http.service import create_app
from fuxi_torchrec.serving.recommender import Recommender
from fuxi_torchrec.serving.tests.exports import export_of
from fuxi_torchrec.serving.tests.random_export import DAY, write_demo_export
from fuxi_torchrec.serving.tests.recommenders import DEMO, change_manifest, expected, log_export
from fuxi_torchrec.tasks.base import Correction

REPEATING = replace(DEMO, repeats={"window": 6, "periods": (DAY,)})
ITEMS = 30


def catalogue_of(tmp_path, approximate):
    """One of a few items, and some that were added; ``approximate``: by an index that finds the best all the same."""
    import faiss

    write_demo_export(tmp_path / "x", replace(DEMO, items=ITEMS))
    if approximate:
        vectors = Catalogue(Bundle.open(tmp_path / "x"), "exact").vectors.numpy()
        inverted = faiss.IndexIVFFlat(faiss.IndexFlatIP(16), 16, 2, faiss.METRIC_INNER_PRODUCT)
        inverted.train(vectors)
        inverted.add_with_ids(vectors, np.arange(1, ITEMS + 1))
        inverted.nprobe = 2
        faiss.write_index(inverted, str(tmp_path / "x" / INDEX))
        change_manifest(tmp_path / "x", files={INDEX: vars(describe_file(tmp_path / "x" / INDEX))})
    catalogue = Catalogue(Bundle.open(tmp_path / "x"), "index")
    assert (catalogue._faiss is not None) == approximate
    new = np.arange(ITEMS + 1, ITEMS + 4)
    vectors = torch.randn(3, 16, generator=torch.Generator().manual_seed(5))
    return catalogue.with_items(pa.array(new + 1000), new, vectors, {})


@pytest.fixture(scope="module", params=[False, True], ids=["exact", "index"])
def catalogue(request, tmp_path_factory):
    return catalogue_of(tmp_path_factory.mktemp("catalogue"), request.param)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 999), k=st.integers(1, 50), width=st.integers(1, 12), large=st.sampled_from([0.1, 3.0, 50.0])
)
def test_the_best_k_are_those_of_brute_force(catalogue, seed, k, width, large):
    draw = torch.Generator().manual_seed(seed)
    users, items = 4, len(catalogue)
    vectors = torch.randn(users, 16, generator=draw)
    bias, shift = (large * torch.randn(users, n, generator=draw) for n in (width, 16))  # of both signs
    ids = torch.stack([torch.randperm(items, generator=draw)[:width] + 1 for _ in range(users)])
    ids[torch.rand(users, width, generator=draw) < 0.2] = 0
    ids[0] = 0  # nobody's
    ids[1, -1] = 5000  # of no item that can be recommended
    seen = [None, None, None, np.concatenate([ids[3].numpy(), [4, 7]])]
    places, scores = catalogue.search(vectors, k, seen, Correction(ids, bias, shift))
    every = vectors @ catalogue.vectors.T
    for user in range(users):
        for slot, item in enumerate(ids[user].tolist()):
            if 0 < item <= items:
                every[user, item - 1] = (vectors[user] + shift[user]) @ catalogue.vectors[item - 1] + bias[user, slot]
        if seen[user] is not None:
            every[user, [item - 1 for item in seen[user] if 0 < item <= items]] = -torch.inf
        best = torch.argsort(every[user], descending=True)[:k]
        best = best[every[user, best].isfinite()]
        assert places[user][places[user] >= 0].tolist() == best.tolist()
        got = torch.from_numpy(scores[user][: len(best)]) * catalogue.temperature
        torch.testing.assert_close(got, every[user, best], atol=1e-4, rtol=1e-4)


def test_seen_items_are_left_out_and_the_others_score_without_a_bias(tmp_path):
    log, last = log_export(tmp_path, REPEATING)
    users = [user for user in range(8) if log.of(user)]
    with Recommender.load(tmp_path / "x") as recommender:
        for user, answer in zip(users, recommender.recommend(users, last + DAY, 50, exclude_seen=True), strict=True):
            items, scores = expected(tmp_path / "x", REPEATING, log.of(user), last + DAY)
            seen = {row[1] for row in log.of(user)[-REPEATING.max_length :]}
            assert answer.items == [item for item in items if item not in seen]
            wanted = [score for item, score in zip(items, scores.tolist(), strict=True) if item not in seen]
            assert answer.scores == pytest.approx(wanted, abs=1e-3)


def test_histories_that_nobody_stores_times_that_go_back_and_users_without_events(tmp_path):
    log, last = log_export(tmp_path, REPEATING, users=8)
    user = max(range(8), key=lambda user: len(log.of(user)))
    rows = log.of(user)
    with Recommender.load(tmp_path / "x") as recommender:
        for time in (last + DAY, rows[0][2] - DAY):  # before the last event: no time has passed since
            answer = recommender.recommend_history([row[1] for row in rows], [row[2] for row in rows], time, 9)
            assert answer.items == expected(tmp_path / "x", REPEATING, rows, time)[0][:9]
            assert recommender.recommend([user], time, 9)[0].items == answer.items
        nobody = recommender.recommend(["nobody" if REPEATING.user_id_type == "string" else 77], last, 3)[0]
        assert nobody.scores == [0.0] * 3 and recommender.recommend_history([], [], last, 3).items == nobody.items
        recommender.forget([user])
        assert recommender.recommend([user], last, 3)[0].items == nobody.items
        recommender.append([user, user], [1003, 1003], [last, last])
        again = [(user, 1003, last, {"action": 0, "tags": []})] * 2
        assert (
            recommender.recommend([user], last, 9)[0].items == expected(tmp_path / "x", REPEATING, again, last)[0][:9]
        )


def test_similar_items_know_nothing_of_windows(tmp_path):
    for name, demo in (("x", DEMO), ("y", REPEATING)):
        write_demo_export(tmp_path / name, demo)
    answers = []
    for name in ("x", "y"):
        with Recommender.load(tmp_path / name) as recommender:
            answers.append(recommender.similar_items(1004, 9))
    assert answers[0] == answers[1]


def test_what_was_appended_goes_on_with_exports_that_have_windows_and_those_that_have_none(tmp_path):
    log, last = log_export(tmp_path, DEMO)
    export_of(tmp_path / "y", log, range(8), REPEATING)
    user = min((u for u in range(8) if log.of(u)), key=lambda u: len(log.of(u)))
    with Recommender.load(tmp_path / "x", log_dir=tmp_path / "log") as recommender:
        recommender.append([user] * 2, [1003, 1004], [last, last + 1])
    rows = log.of(user) + [(user, item, last + n, {"action": 0, "tags": []}) for n, item in enumerate((1003, 1004))]
    for path, demo in ((tmp_path / "y", REPEATING), (tmp_path / "x", DEMO), (tmp_path / "y", REPEATING)):
        with Recommender.load(path, log_dir=tmp_path / "log") as recommender:
            assert (
                recommender.recommend([user], last + DAY, 7)[0].items == expected(path, demo, rows, last + DAY)[0][:7]
            )


def test_a_damaged_window_is_made_again_from_the_history(tmp_path):
    log, last = log_export(tmp_path, REPEATING)
    before = {}
    with Recommender.load(tmp_path / "x") as recommender:
        users = [u for u in range(8) if len(log.of(u)) >= REPEATING.state_min_events]
        before = [answer.items for answer in recommender.recommend(users, last, 9)]
    for path in (tmp_path / "x" / STATES).iterdir():
        damaged = bytearray(path.read_bytes())
        size = Bundle.open(tmp_path / "x").manifest.state_bytes
        for end in range(len(damaged), 4096, -size):
            damaged[end - 20] ^= 1  # a time of the window
        path.write_bytes(damaged)
    with Recommender.load(tmp_path / "x") as recommender:
        assert [answer.items for answer in recommender.recommend(users, last, 9)] == before
        assert recommender.info()["damaged_states"] == len(users) > 0


def test_an_export_whose_parts_do_not_fit_is_refused(tmp_path):
    write_demo_export(tmp_path / "x", REPEATING)
    repeats = Bundle.open(tmp_path / "x").manifest.repeats
    wrong = [
        ({}, "repeats.safetensors is there, and repeats says nothing of it"),
        (repeats | {"window": 0}, "window must be 1 to 65536"),
        (repeats | {"colour": 1}, "colour"),
        (repeats | {"periods": [3, 4]}, "not the weights of"),
        (repeats | {"window": 7}, "states and windows have"),
    ]
    for given_, message in wrong:
        change_manifest(tmp_path / "x", repeats=given_)
        with pytest.raises(ExportError, match=message), Recommender.load(tmp_path / "x"):
            pass
    change_manifest(tmp_path / "x", repeats=repeats)
    save_file({"since": torch.zeros(3)}, tmp_path / "x" / REPEATS)
    with pytest.raises(ExportError, match=r"repeats.safetensors"), Recommender.load(tmp_path / "x"):
        pass


def test_over_http_windows_follow_events_and_unstored_histories_as_in_the_recommender(tmp_path):
    log, last = log_export(tmp_path, REPEATING)
    user = max(range(8), key=lambda user: len(log.of(user)))
    new = [(user, item, last + n, {"action": 0, "tags": []}) for n, item in enumerate((1003, 1004, 1003))]
    events = [{"user_id": row[0], "item_id": row[1], "timestamp": row[2]} for row in new]
    recommender = Recommender.load(tmp_path / "x", log_dir=tmp_path / "log", warm_up=False)
    with TestClient(create_app(recommender)) as client:

        def asked(rows):
            body = {"user_id": user, "time": last + DAY, "k": 9}
            answer = client.post("/recommend", json=body).json()
            assert answer == recommender.recommend([user], last + DAY, 9)[0].to_dict()
            assert [each["item_id"] for each in answer["items"]] == expected(
                tmp_path / "x", REPEATING, rows, last + DAY
            )[0][:9]
            return answer

        before = asked(log.of(user))
        assert client.post("/append", json={"events": events}).json()["accepted"] == len(events)
        assert asked(log.of(user) + new)["items"] != before["items"]
        unstored = [{"item_id": row[1], "timestamp": row[2]} for row in new]
        body = {"events": unstored, "time": last + DAY, "k": 9}
        answer = client.post("/recommend-history", json=body).json()
        wanted = recommender.recommend_history([r[1] for r in new], [r[2] for r in new], last + DAY, 9)
        assert answer == wanted.to_dict()
        assert [each["item_id"] for each in answer["items"]] == expected(tmp_path / "x", REPEATING, new, last + DAY)[0][
            :9
        ]
