"""Runs with repeats as exports: the model's own scores from files alone, on any number of processes."""

import numpy as np
import pytest
import torch

from fuxi_torchrec.export.bundle import Bundle, scaled
from fuxi_torchrec.export.programs import APPEND, QUERY
from fuxi_torchrec.serving.encoding import UserModel
from fuxi_torchrec.serving.recommender import Recommender
from fuxi_torchrec.serving.tests.exports import assert_states_close, check_window, users_of, window_of
from integration_tests import retrieval_runs as small
from integration_tests.test_export import export

pytestmark = pytest.mark.timeout(300)
SETTINGS = ["task.repeats.window=5", "task.repeats.periods=[86400,604800]", "train.max_steps=12", "optimizer.lr=0.05"]


@pytest.fixture(scope="module")
def exports(workers, tmp_path_factory):
    place = tmp_path_factory.mktemp("repeats")
    data = small.dataset(place / "set", feature="single").path
    workers(2).run(small.train, place / "run", [f"data.path={data}", *SETTINGS])
    for processes in (1, 2, 4):
        workers(processes).run(export, place / "run", place / str(processes), programs=processes == 1)
    return {n: Bundle.open(place / str(n)) for n in (1, 2, 4)}


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_users_have_the_windows_and_scores_of_the_definition(exports, processes):
    bundle = exports[processes]
    model, found = UserModel(bundle), users_of(bundle.path)
    assert bundle.manifest.repeats["window"] == 5 and bundle.manifest.repeats["periods"] == [86400, 604800]
    assert all(float(p.abs().max()) > 0 for p in model.bias.parameters())  # it was learned
    assert bundle.manifest.model_id == exports[1].manifest.model_id
    for one in found.values():
        check_window(model, one.row, one.history, torch.from_numpy(one.row["embedding"]))
        if one.state is not None:
            assert_states_close(model.read(one.state), model.encode(one.history), 1e-4)
    assert any(one.state is not None for one in found.values()) and any(
        0 in o.row["window_item"] for o in found.values()
    )


def test_answers_are_those_of_files_alone(exports):
    bundle = exports[2]
    model, found, time = UserModel(bundle), users_of(bundle.path), bundle.manifest.as_of
    with Recommender.load(bundle.path) as recommender:
        ids, index = recommender._catalogue.ids.to_pylist(), recommender._catalogue.index
        items = scaled(model.items, bundle.manifest.similarity)
        for user, answer in zip(found, recommender.recommend(list(found), time, 10), strict=True):
            vector = torch.from_numpy(found[user].row["embedding"])
            scores = dict(
                zip(index.tolist(), (items[index] @ vector / bundle.manifest.temperature).tolist(), strict=True)
            )
            scores |= window_of(model, found[user].history, vector, time)
            best = sorted(scores, key=lambda item: -scores[item])[:10]
            assert answer.items == [ids[int(np.searchsorted(index, item))] for item in best]
            assert answer.scores == pytest.approx([scores[item] for item in best], abs=1e-3)


def test_programs_take_events_one_by_one_and_know_the_window(exports):
    bundle = exports[1]
    model, one = UserModel(bundle), max(users_of(bundle.path).values(), key=lambda one: len(one.history.items))
    append, query = (torch.export.load(bundle.file(f"programs/{name}")).module() for name in (APPEND, QUERY))
    rows, items, times = model.rows(one.history), one.history.items, one.history.times
    empty = model.init_state(1)
    state = (*empty.encoded.flat(), *empty.windows.tensors())
    for n in range(len(items)):
        state = append(state, rows[n : n + 1], torch.tensor(times[n : n + 1]), torch.tensor(items[n : n + 1]))
    vector, ids, bias, shift = query(state, torch.tensor([one.row["as_of"]]))
    torch.testing.assert_close(vector[0], torch.from_numpy(one.row["embedding"]), atol=1e-4, rtol=1e-4)
    assert ids[0].tolist() == one.row["window_item"]
    products = ((vector + shift) @ scaled(model.items, bundle.manifest.similarity)[ids[0]].T + bias)[0]
    there = ids[0] > 0
    torch.testing.assert_close(products[there], torch.tensor(one.row["window_score"])[there], atol=1e-4, rtol=1e-4)
