"""A Recommender under threads: what must hold whatever they do."""

import threading

import numpy as np

from fuxi_torchrec.events.histories import Histories
from fuxi_torchrec.export.bundle import Bundle, scaled
from fuxi_torchrec.serving.encoding import UserModel
from fuxi_torchrec.serving.recommender import Recommender
from fuxi_torchrec.serving.tests.exports import assert_states_close, export_of, random_log, users_of
from fuxi_torchrec.serving.tests.random_export import DAY, DemoExport


def mixed_operations(tmp_path, operations, every, threads=8, users=24):
    """Append, forget and ask from several threads; check the states and every so many answers. How many were checked.

    Each user has one thread that writes; everybody asks for everybody. The writer is answered with exactly the events
    that were told.
    """
    model = {**DemoExport().model, "dim": 8, "num_layers": 1, "num_heads": 1, "kernel_dim": 4}
    model["temporal_periods"] = (3600, DAY)
    demo = DemoExport(items=50, model=model, max_length=40, state_min_events=20, users_per_part=5)
    export_of(tmp_path / "x", random_log(np.random.default_rng(0), demo, range(users), 30), range(users), demo)
    last, stored = Bundle.open(tmp_path / "x").manifest.as_of, users_of(tmp_path / "x")
    recommender = Recommender.load(tmp_path / "x")
    recommender.users.cache_bytes = (users - 4) * recommender.states([0]).nbytes
    clock, clock_lock = [last], threading.Lock()
    told, answers, failures = [[] for _ in range(threads)], [[] for _ in range(threads)], []

    def work(number):
        draw = np.random.default_rng(number)
        mine = [user for user in range(users) if user % threads == number]
        events = {user: stored[user].row["events"] for user in mine}
        try:
            for n in range(operations):
                what = draw.random()
                if what < 0.6:
                    user = int(draw.choice(mine))
                    with clock_lock:
                        clock[0] += 1
                        time = clock[0]
                    item = 1001 + int(draw.integers(50))
                    assert recommender.append([user], [item], [time]).accepted == 1
                    told[number].append((user, item, time))
                    events[user] += 1
                elif what < 0.604:
                    user = int(draw.choice(mine))
                    recommender.forget([user])
                    told[number].append((user, None, None))
                    events[user] = 0
                else:
                    asked = draw.choice(users, 1 + (n % 8 == 0), replace=False).tolist()
                    got = recommender.recommend(asked, last + 10 * DAY, 3, exclude_seen=bool(n % 4 == 0))
                    for answer in got:
                        assert answer.events == events.get(answer.user_id, answer.events), answer
                    if n % every == 0:
                        answers[number].append(got)
        except BaseException as error:
            failures.append(error)
            raise

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    final = recommender.states(range(users))
    recommender.close()
    # the same in one thread: only the order within a user matters, and each user had one writer
    with Recommender.load(tmp_path / "x", log_dir=tmp_path / "sequential") as sequential:
        for number in range(threads):
            for user, item, time in told[number]:
                if item is None:
                    sequential.forget([user])
                else:
                    sequential.append([user], [item], [time])
        assert_states_close(final, sequential.states(range(users)), 2e-5)
    # and after a restart
    with Recommender.load(tmp_path / "x") as again:
        assert_states_close(final, again.states(range(users)), 2e-5)
    # each answer is that of a prefix of its user's events
    wanted = {}
    for got in (answer for some in answers for batch in some for answer in batch):
        wanted.setdefault(got.user_id, {}).setdefault(got.events, []).append(got)
    model = UserModel(Bundle.open(tmp_path / "x"))
    checked = 0
    for user, by_events in wanted.items():
        prefixes = prefix_scores(model, stored[user].history, [t for some in told for t in some if t[0] == user])
        for count, some in by_events.items():
            for answer in some:
                if answer.events == 0:
                    continue
                assert any(
                    np.allclose([scores[item - 1001] for item in answer.items], answer.scores, atol=1e-3)
                    for scores in prefixes(count, last + 10 * DAY)
                ), answer
                checked += 1
    return checked


def prefix_scores(model, history, told):
    """Of a number of events: scores of all items after each prefix of what was told that leaves so many."""
    items, times = history.items.tolist(), history.times.tolist()
    prefixes = [(items[:], times[:])]
    for _, item, time in told:
        if item is None:
            items, times = [], []
        else:
            items, times = [*items, item - 1000], [*times, time]
        prefixes.append((items, times))

    def scores(count, time):
        for some_items, some_times in prefixes:
            if len(some_items) == count:
                events = Histories(np.array([0, count]), np.array(some_items), np.array(some_times))
                vector = model.vectors(model.encode(events), np.array([time]))
                catalogue = scaled(model.items[1:], model.manifest.similarity)
                yield (catalogue @ vector[0] / model.manifest.temperature).numpy()

    return scores
