"""The service: what it answers, what it refuses, and how it works on many requests at once."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fastapi.testclient import TestClient

from fuxi_torchrec.events.features import Feature
from fuxi_torchrec.serving.http.service import create_app
from fuxi_torchrec.serving.options import Limits
from fuxi_torchrec.serving.recommender import Recommender
from fuxi_torchrec.serving.tests.disks import failing_commits
from fuxi_torchrec.serving.tests.random_export import DAY, DemoExport, write_demo_export

DEMO = DemoExport(items=30, users=10)
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    path = tmp_path_factory.mktemp("service") / "x"
    write_demo_export(path, DEMO)
    return path


@pytest.fixture
def recommender(export, tmp_path):
    return Recommender.load(export, log_dir=tmp_path / "log", warm_up=False)


@pytest.fixture
def client(recommender):
    limits = Limits(max_k=100, max_body_kib=5, max_events=20)
    with TestClient(create_app(recommender, limits=limits), raise_server_exceptions=False) as client:
        yield client


def as_of(client):
    return client.get("/health").json()["as_of"]


def test_it_answers_as_the_recommender_does(client, recommender):
    time = as_of(client) + DAY
    answer = client.post("/recommend", json={"user_id": 3, "time": time, "k": 5, "exclude_seen": True}).json()
    assert answer == recommender.recommend([3], time, 5, exclude_seen=True)[0].to_dict()
    events = [{"item_id": 1001, "timestamp": time}, {"item_id": 1002, "timestamp": time - 5}]
    got = client.post("/recommend-history", json={"events": events, "time": time}).json()
    assert got == recommender.recommend_history([1002, 1001], [time - 5, time], time).to_dict()


def test_events_count_at_once_and_users_can_be_forgotten(client):
    time = as_of(client) + DAY
    events = [{"user_id": 77, "item_id": 1001, "timestamp": time}, {"user_id": 77, "item_id": 5, "timestamp": time}]
    events.append({"user_id": 77, "item_id": 1001, "timestamp": time - 1})
    counts = {"accepted": 2, "late": 1, "unknown_items": 1, "rare_items": 0, "filtered": 0}
    assert client.post("/append", json={"events": events}).json() == counts
    answer = client.post("/recommend", json={"user_id": 77, "time": time}).json()
    assert (answer["known"], answer["events"]) == (True, 2)
    assert client.post("/forget", json={"user_ids": [77, 78]}).json() == {"forgotten": 1}
    assert not client.post("/recommend", json={"user_id": 77, "time": time}).json()["known"]


def test_whole_floats_are_integers_in_json(client):
    body = f'{{"user_id": 3.0, "time": {as_of(client)}.0, "k": 2e0}}'
    assert len(client.post("/recommend", content=body, headers=JSON).json()["items"]) == 2


def test_the_servers_clock_is_the_default(client):
    answer = client.post("/recommend", json={"user_id": 3})
    assert abs(answer.json()["as_of"] - time.time()) < 5


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/recommend", '{"user_id": NaN}', 422, "user_id"),
        ("/recommend", '{"user_id": 1, "time": Infinity}', 422, "time"),
        ("/recommend", '{"user_id": 1, "time": 1e400}', 422, "time"),
        ("/recommend", '{"user_id": 1, "time": 1.5}', 422, "time"),
        ("/recommend", '{"user_id": "1"}', 422, "user_id"),
        ("/recommend", '{"user_id": 1, "k": 101}', 422, "k"),
        ("/recommend", '{"user_id": 1, "k": 0}', 422, "k"),
        ("/recommend", '{"user_id": 1, "K": 5}', 422, "K"),
        ("/recommend", '{"user_id": 99999999999999999999}', 422, "user_id"),
        ("/recommend", '{"user_id": 1, "time": 1700000000000}', 422, "looks like milliseconds"),
        ("/recommend", "{", 422, "JSON"),
        ("/recommend", "[" * 4000, 400, "body"),
        ("/recommend", "9" * 4500, 400, "body"),
        ("/recommend", '{"user_id": "\\ud800"}', 422, "user_id"),
        ("/recommend", b"\xff\xfe", 422, "body"),
        ("/recommend", '{"user_id": 1, "x": "' + "y" * 6000 + '"}', 413, "5,120 bytes"),
        ("/append", '{"events": []}', 422, "events"),
        ("/append", '{"events": [' + ",".join(['{"user_id":1,"item_id":1,"timestamp":1}'] * 21) + "]}", 422, "20"),
        ("/append", '{"events": [{"user_id": 1, "item_id": 1, "timestamp": -4}]}', 422, "timestamp"),
        (
            "/append",
            '{"events": [{"user_id": 1, "item_id": 1, "timestamp": 5, "features": {"a": 1}}]}',
            422,
            "features.a",
        ),
        ("/recommend-history", '{"events": [{"item_id": 1}]}', 422, "timestamp"),
        ("/recommend-history", '{"events": [{"item_id": 1, "timestamp": 1700000000000000}]}', 422, "microseconds"),
        ("/forget", '{"user_ids": [null]}', 422, "user_ids"),
    ],
)
def test_bad_bodies_are_refused_with_a_reason(client, path, body, status, said):
    answer = client.post(path, content=body, headers=JSON)
    assert answer.status_code == status, answer.text
    assert said in answer.json()["detail"]


def test_a_body_without_a_length_is_cut_off_too(client):
    def forever():
        for _ in range(100):
            yield b"x" * 1000

    assert client.post("/recommend", content=forever()).status_code == 413


def test_a_wrong_token_is_refused(recommender):
    with TestClient(create_app(recommender, token="sesame")) as client:
        ask = {"user_id": 1, "time": recommender.manifest.as_of}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic sesame"}):
            answer = client.post("/recommend", json=ask, headers=headers)
            assert answer.status_code == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
        assert client.get("/metrics").status_code == 401
        assert client.get("/health").status_code == 200
        assert client.post("/recommend", json=ask, headers={"Authorization": "Bearer sesame"}).status_code == 200


@pytest.mark.parametrize(("path", "status"), [("/append", 401), ("/metrics", 401), ("/nowhere", 401), ("/health", 405)])
def test_no_body_is_read_without_the_token(recommender, path, status):
    async def receive():
        raise AssertionError("the body was asked for")

    async def send(message):
        sent.append(message)

    sent = []
    headers = [(b"content-length", b"1000"), (b"authorization", b"Bearer wrong")]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    asyncio.run(create_app(recommender, token="sesame")(scope, receive, send))
    assert sent[0]["status"] == status
    recommender.close()


def test_the_command_bounds_connections_and_events(export, tmp_path, monkeypatch):
    from pipelines import serve

    def run(app, bound, limits, stop_seconds):
        bound.close()
        ran.append((limits.max_connections, limits.header_seconds, stop_seconds))
        with TestClient(app) as client:
            assert "fuxi_max_recent_events 7.0" in client.get("/metrics").text

    ran = []
    monkeypatch.setattr("fuxi_torchrec.serving.http.server.run", run)
    arguments = ["--export", str(export), "--port", "0", "--log-dir", str(tmp_path / "log"), "--max-recent-events", "7"]
    others = ["--max-connections", "5", "--header-seconds", "2", "--stop-seconds", "3"]
    assert serve.main(arguments) == serve.main([*arguments, *others]) == 0
    assert ran == [(1024, 10.0, 10), (5, 2.0, 3)]


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "json"])
def test_a_body_must_say_that_it_is_json(client, kind):
    headers = {"Content-Type": kind} if kind else {}
    answer = client.post("/recommend", content=b'{"user_id": 3}', headers=headers)
    assert answer.status_code == 415
    assert "with the header Content-Type: application/json" in answer.json()["detail"]
    assert (kind or "no Content-Type") in answer.json()["detail"]
    said = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert client.post("/recommend", content=b'{"user_id": 3}', headers=said).status_code == 200


def test_a_disk_that_failed_is_bad_health(client, recommender):
    event = {"user_id": 3, "item_id": 1001, "timestamp": as_of(client)}
    with failing_commits(recommender, "SQLITE_IOERR_FSYNC"):
        assert client.post("/append", json={"events": [event]}).status_code == 503
    health = client.get("/health")
    assert health.status_code == 503 and "nothing can be appended until a restart" in health.json()["detail"]
    assert "fuxi_log_failed 1.0" in client.get("/metrics").text
    assert client.post("/recommend", json={"user_id": 3, "time": event["timestamp"]}).status_code == 200


def test_an_event_that_is_yet_to_come_is_refused(client):
    event = {"user_id": 3, "item_id": 1001, "timestamp": int(time.time()) + 3 * DAY}
    answer = client.post("/append", json={"events": [event]})
    assert answer.status_code == 422 and "is in the future: events have happened" in answer.json()["detail"]


def test_more_events_than_memory_has_room_for_are_refused(client, recommender):
    recommender._appender.max_recent_events = 1
    event = {"user_id": 3, "item_id": 1001, "timestamp": as_of(client)}
    refused = client.post("/append", json={"events": [event, event]})
    assert refused.status_code == 503 and "Refresh and restart on the new export" in refused.json()["detail"]
    assert client.post("/append", json={"events": [event]}).status_code == 200
    assert "fuxi_max_recent_events 1.0" in client.get("/metrics").text


def test_metrics_tell_what_happened(client):
    client.post("/recommend", json={"user_id": 987, "time": as_of(client)})
    client.post("/recommend", json={})
    client.get("/nowhere")
    text = client.get("/metrics").text
    for line in (
        'fuxi_requests_total{path="/recommend",status="200"} 1.0',
        'fuxi_requests_total{path="/recommend",status="422"} 1.0',
        'fuxi_requests_total{path="other",status="404"} 1.0',
        "fuxi_unknown_users_total 1.0",
        'fuxi_batch_size_count{what="recommend"} 1.0',
        'fuxi_export{as_of="',
    ):
        assert line in text, line


def test_a_disk_that_is_full_is_said(client, recommender):
    event = {"user_id": 1, "item_id": 1001, "timestamp": as_of(client) + DAY}
    with failing_commits(recommender, "SQLITE_FULL"):
        assert client.post("/append", json={"events": [event]}).status_code == 503
    assert client.post("/append", json={"events": [event]}).json()["accepted"] == 1


def test_text_ids(tmp_path):
    write_demo_export(tmp_path / "x", DemoExport(items=30, users=5, user_id_type="string", item_id_type="string"))
    recommender = Recommender.load(tmp_path / "x")
    with TestClient(create_app(recommender), raise_server_exceptions=False) as client:
        answer = client.post("/recommend", json={"user_id": "user-3", "time": recommender.manifest.as_of, "k": 1})
        assert answer.json()["known"] and answer.json()["items"][0]["item_id"].startswith("item-")
        long = "x" * 2048
        event = {"user_id": long, "item_id": long, "timestamp": recommender.manifest.as_of}
        assert client.post("/append", json={"events": [event]}).json()["accepted"] == 1
        assert client.post("/recommend", json={"user_id": long, "time": event["timestamp"]}).json()["known"]
        for bad in ('"\\ud800"', '""', "5", f'"{long}x"'):
            body = f'{{"user_id": {bad}}}'
            answer = client.post("/recommend", content=body, headers=JSON)
            assert answer.status_code == 422 and "user_id" in answer.json()["detail"]


def test_features_may_have_any_name(tmp_path):
    names = ("_action", "_tags", "copy", "feature_0", "model_config")
    features = tuple(Feature(name, multiple=name == "_tags", pooling="sum") for name in names)
    write_demo_export(tmp_path / "x", DemoExport(items=30, users=5, features=features, text_features=("copy",)))
    recommender = Recommender.load(tmp_path / "x")
    given = {"_action": 3, "_tags": [1, 2], "copy": "value-1", "feature_0": 4}
    with TestClient(create_app(recommender)) as client:
        event = {"user_id": 3, "item_id": 1001, "timestamp": as_of(client), "features": given}
        assert client.post("/append", json={"events": [event]}).json()["accepted"] == 1
        assert recommender.users.recent[3].raw[0].features == given
        described = client.get("/openapi.json").json()["components"]["schemas"]["Features"]["properties"]
        assert list(described) == list(names)
        event["features"] = {"feature_1": [1]}
        refused = client.post("/append", json={"events": [event]})
        assert refused.status_code == 422 and "features.feature_1" in refused.json()["detail"]


def test_features_that_the_recommender_refuses_are_refused_here_too(tmp_path):
    features = (Feature("action"), Feature("tags", multiple=True, pooling="sum"), Feature("surface"))
    write_demo_export(tmp_path / "x", DemoExport(items=30, users=5, features=features, text_features=("surface",)))
    recommender = Recommender.load(tmp_path / "x")
    rows, refused = recommender.feature_rows, 0
    assert rows.keys() == {"action", "tags"}
    with TestClient(create_app(recommender)) as client:
        when = as_of(client)
        for name in ("action", "tags", "surface", "other"):
            most = rows.get(name, 10) - 1
            for value in (0, most, most + 1, -1, True, 1.5, "", "seen", "never seen", [], [1, most], [most + 1], ["x"]):
                event = {"user_id": 3, "item_id": 1001, "timestamp": when, "features": {name: value}}
                try:
                    recommender.append([3], [1001], [when], features=[{name: value}])
                    status = 200
                except ValueError:
                    status, refused = 422, refused + 1
                answer = client.post("/append", json={"events": [event]})
                assert answer.status_code == status, (name, value, answer.text)
                assert status == 200 or f"features.{name}" in answer.json()["detail"]
    assert 0 < refused < 52


def test_events_that_wait_are_bounded(recommender, monkeypatch):
    began, gate, append = threading.Event(), threading.Event(), recommender.append_events

    def slowly(groups, **given):
        began.set()
        assert gate.wait(10)
        return append(groups, **given)

    monkeypatch.setattr(recommender, "append_events", slowly)
    limits = Limits(max_waiting_events=10)
    with TestClient(create_app(recommender, limits=limits)) as client, ThreadPoolExecutor(1) as pool:
        event = {"user_id": 3, "item_id": 1001, "timestamp": as_of(client)}
        first = pool.submit(client.post, "/append", json={"events": [event] * 10})
        assert began.wait(10)
        refused = client.post("/append", json={"events": [event]})
        gate.set()
        assert (refused.status_code, refused.json()["detail"]) == (503, "too many requests are waiting")
        assert first.result(10).json()["accepted"] == 10


def test_health_and_metrics_wait_for_nobody(client, recommender):
    class Held:
        def __enter__(self):
            raise AssertionError("events are being appended: this would wait")

        def __exit__(self, *_):
            pass

    users, lock = recommender.users, recommender.users.lock
    users.lock = Held()
    try:
        assert client.get("/health").status_code == 200
        assert "fuxi_recent_events 0.0" in client.get("/metrics").text
    finally:
        users.lock = lock


def test_each_event_is_checked_once(client, recommender, monkeypatch):
    checked = []
    for name in ("http.bodies", "requests"):
        check = f"fuxi_torchrec.serving.{name}.check_event_time"
        monkeypatch.setattr(check, lambda value, *_, **__: checked.append(value) or value)
    time = as_of(client)
    with TestClient(create_app(recommender)) as counting:
        counting.post("/append", json={"events": [{"user_id": 3, "item_id": 1001, "timestamp": time}]})
    assert checked == [time]


def test_histories_that_wait_are_bounded_too(recommender, monkeypatch):
    began, gate, answer = threading.Event(), threading.Event(), recommender.answer_history

    def slowly(*given):
        began.set()
        assert gate.wait(10)
        return answer(*given)

    monkeypatch.setattr(recommender, "answer_history", slowly)
    with TestClient(create_app(recommender, limits=Limits(max_waiting=1))) as client, ThreadPoolExecutor(1) as pool:
        body = {"events": [{"item_id": 1001, "timestamp": as_of(client)}], "time": as_of(client) + DAY}
        first = pool.submit(client.post, "/recommend-history", json=body)
        assert began.wait(10)
        refused = client.post("/recommend-history", json=body)
        gate.set()
        assert (refused.status_code, refused.json()["detail"]) == (503, "too many requests are waiting")
        assert first.result(10).status_code == 200
        assert client.post("/recommend-history", json=body).status_code == 200


def test_concurrent_requests_get_their_own_answers(client, recommender):
    when = as_of(client) + DAY
    alone = {user: recommender.recommend([user], when, 5)[0] for user in range(10)}

    def ask(n):
        return n % 10, client.post("/recommend", json={"user_id": n % 10, "time": when, "k": 1 + n % 5}).json()

    with ThreadPoolExecutor(8) as pool:
        for user, answer in pool.map(ask, range(80)):
            assert answer["user"] == user
            items = [item["item_id"] for item in answer["items"]]
            assert items == alone[user].items[: len(items)]


def test_a_request_that_cannot_be_answered_fails_alone(recommender, monkeypatch):
    answer, sizes = recommender.answer, []

    def failing(requests):
        sizes.append(len(requests))
        if any(request.user_id == 5 for request in requests):
            raise OSError("the history of user 5 cannot be read")
        return answer(requests)

    monkeypatch.setattr(recommender, "answer", failing)
    app = create_app(recommender, limits=Limits(max_batch=8, batch_window_ms=1000.0))
    with TestClient(app, raise_server_exceptions=False) as client, ThreadPoolExecutor(8) as pool:
        when = as_of(client)
        bodies = [{"user_id": user, "time": when} for user in range(8)]
        codes = list(pool.map(lambda body: client.post("/recommend", json=body).status_code, bodies))
    assert codes == [200] * 5 + [500] + [200] * 2
    assert max(sizes) > 1
