"""Exports, whatever reads them, and the store of a service."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.fuzz.fixtures import WINDOW
from benchmarks.fuzz.formats import Format, written
from fuxi_torchrec import Recommender
from fuxi_torchrec.export.bundle import PROGRAMS, Bundle
from fuxi_torchrec.export.parts import read_users
from fuxi_torchrec.export.programs import example
from fuxi_torchrec.export.states import TRAILER_BYTES
from fuxi_torchrec.tasks.window_state import window_bytes

NEW = [{"item_id": "item-2000", "brand": "brand-1", "kinds": "kind-0|kind-1", "price": 0.5, "text": [0.1, 0.2, 0.3]}]
USERS = [f"user-{n}" for n in range(40)]


def serve(place: Path, fixtures: Path) -> Any:
    """Answers of a Recommender for all users, before and after events; and the users' vectors."""
    bundle = Bundle.open(place)
    now = bundle.manifest.as_of
    with Recommender.load(place, log_dir=place / "own-store") as recommender:
        ids = USERS[:6]
        answers: list[Any] = [recommender.recommend(USERS, now + 60, k=5, exclude_seen=True)]
        features = [{"action": "buy", "surface": 3, "tags": [1, 2]}] * len(ids)
        done = recommender.append(ids, ["item-7"] * len(ids), [now + 100] * len(ids), features=features)
        answers += [done, recommender.recommend(ids, now + 200, k=5)]
        answers.append(recommender.recommend_history(["item-1", "item-2", "unknown"], [now] * 3, now, k=5))
        answers += [recommender.add_items(NEW), recommender.similar_items("item-2000", 5)]
    vectors = [read_users(path).embedding for path in bundle.parts("users")]
    return [[_plain(answer) for answer in answers], vectors]


def search_exactly(place: Path, fixtures: Path) -> Any:
    """Answers without the index."""
    with Recommender.load(place, log_dir=place / "own-store", search="exact") as recommender:
        return [_plain(recommender.recommend(USERS, recommender.manifest.as_of, k=5)), recommender.bundle.tables()]


def run_programs(place: Path, fixtures: Path) -> Any:
    """What the portable programs compute."""
    bundle = Bundle.open(place)
    state, rows, times = example(bundle.encoder(), 3, seed=1)
    files = (bundle.file(f"{PROGRAMS}/{name}.pt2") for name in ("append", "query"))
    append, query = (torch.export.load(str(file)).module() for file in files)
    after = append(state.flat(), rows, times)
    return [[each.numpy() for each in after], query(after, times + 3600, rows).detach().numpy()]  # of users' features


def open_store(place: Path, fixtures: Path) -> Any:
    """What a Recommender knows with its store, then with one more event, and after a restart."""
    found = []
    for extra in (False, True):
        with Recommender.load(fixtures / "export", log_dir=place) as recommender:
            now = recommender.manifest.as_of + 10_000_000
            info = recommender.info()
            found.append([info["recent_users"], info["recent_events"], info["forgotten_users"]])
            found.append(_plain(recommender.recommend(USERS, now, k=5, exclude_seen=True)))
            found.append(_plain(recommender.similar_items("item-1005", 5)))
            if not extra:
                found.append(_plain(recommender.append(["user-1"], ["item-9"], [now])))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return {name: np.array(each) if name == "scores" else each for name, each in vars(value).items()}


def _windows(data: bytes) -> tuple[int, int]:
    """The window in a file's last record."""
    end = len(data) - TRAILER_BYTES
    return end - window_bytes(WINDOW), end


def _files(name: str, *files: str, read: Any = serve) -> Format:
    return Format(f"export-{name}", "export", files, read)


FORMATS = [
    Format("export-manifest", "export", ("manifest.json",), serve, "json"),
    _files("encoder", "encoder.safetensors"),
    _files("tables", "tables.safetensors"),
    _files("tables-exact", "tables.safetensors", "items/*.parquet", read=search_exactly),
    _files("items", "items/*.parquet"),
    _files("users", "users/*.parquet"),
    _files("histories", "histories/*.parquet"),
    _files("features", *(f"{kind}features/*.parquet" for kind in ("", "item-", "user-")), "other-items.parquet"),
    _files("states", "states/*.bin"),
    _files("index", "index.faiss"),
    _files("programs", "programs/*.pt2", read=run_programs),
    Format("export-repeats", "repeats", ("repeats.safetensors",), serve),
    Format("export-repeats-manifest", "repeats", ("manifest.json",), serve, "json"),
    Format("export-repeats-users", "repeats", ("users/*.parquet", "states/*.bin"), serve),
    Format("export-windows", "repeats", ("states/*.bin",), serve, span=_windows),
    Format("store", "store", ("*",), open_store),
    Format("store-killed", "killed-store", ("*",), open_store, span=written),
]
