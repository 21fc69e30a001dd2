"""Trained runs for tests of evaluation and export, and what plain Python makes of them."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

from fuxi_torchrec.config import Config
from fuxi_torchrec.data.tests.small import make_dataset, random_histories
from fuxi_torchrec.encoders import make_encoder
from fuxi_torchrec.encoders.base import SequenceEncoder
from integration_tests import runs

ITEMS, PATTERNS = 60, 17
CUTS, BUCKETS = (1, 5, 10, 50, 200), (20, 50, 200, 1_000, 5_000)
SETTINGS = ["train.max_steps=2", "train.epochs=9", "batch.max_length=24", "data.min_item_events=18"]


def dataset(path, feature=None, seed=4):
    """40 users of 1 to 70 events; one of them has an event only."""
    histories = random_histories(seed, 40, 70, ITEMS)
    histories[7] = (histories[7][0][:1], histories[7][1][:1])
    return make_dataset(path, histories, ITEMS, block_users=11, feature=feature)


def train(run_dir, settings, pattern=False):
    """Train a little, and with a pattern put small integers with many equal rows in place of the item table."""
    from fuxi_torchrec.embeddings.sharding import local_parts

    made, _ = runs.trainer(run_dir, [*SETTINGS, *settings])
    made.train()
    if pattern:
        generator = torch.Generator().manual_seed(1)
        rows = torch.randint(-2, 3, (PATTERNS, made.config.model.dim), generator=generator).float()
        rows = rows[torch.arange(ITEMS + 1) % PATTERNS]
        for part in local_parts(made.model):
            if part.table == "item_table":
                (a, b), (n, m) = (part.first_row, part.first_column), part.tensor.shape
                part.tensor.detach().copy_(rows[a : a + n, b : b + m])
        made._saved_at = -1  # the tensors are new
        made.save()
        made.saver.wait()
    return made.progress.step


def load(run_dir, **options):
    from fuxi_torchrec.evaluation import loading

    return loading.load(run_dir, runs.here(), **options)


def attempt(function, *arguments, **options):
    """The error of a call, or None."""
    try:
        function(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


# --- by plain Python -------------------------------------------------------------------------------------------------


@dataclass
class Plain:
    """A run without shards."""

    config: Config
    encoder: SequenceEncoder
    table: torch.Tensor
    features: dict
    known: np.ndarray
    histories: list  # items, times, action of each user


def plain(run_dir, data, step=None):
    from fuxi_torchrec.training.checkpoint.info import find_checkpoint
    from fuxi_torchrec.training.checkpoint.unshard import read_plain
    from fuxi_torchrec.training.run_directory import RunDirectory

    config = RunDirectory(run_dir).read_config()
    weights = read_plain(find_checkpoint(Path(run_dir) / "checkpoints", str(step) if step else "latest"))
    encoder = make_encoder(config.model).eval().requires_grad_(False)
    encoder.load_state_dict({k.removeprefix("encoder."): v for k, v in weights.items() if k.startswith("encoder.")})
    known = np.concatenate([[False], pq.read_table(Path(run_dir) / "items.parquet")["known"].to_numpy()])
    rows = pq.read_table(f"{data}/part-00000.parquet").to_pylist()
    histories = [(row["user_id"], row["item"], row["timestamp"], row.get("action")) for row in rows]
    features = {k: v for k, v in weights.items() if k.startswith("feature_")}
    return Plain(config, encoder, weights["item_table"], features, known, histories)


def vectors(run, users):
    """(B, D) of users given as items, times, actions and the request time: the forward pass over the last events."""
    n = run.config.batch.max_length
    rows = run.table[[i if run.known[i] else 0 for items, *_ in users for i in items[-n:]]]
    if run.features:
        rows = rows + run.features["feature_action"][[a for _, _, actions, _ in users for a in actions[-n:]]]
    ends = torch.tensor([len(items[-n:]) for items, *_ in users]).cumsum(0)
    times = torch.tensor([t for _, times, *_ in users for t in times[-n:]])
    request_times = torch.tensor([each for *_, each in users])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products: threads would only wait for each other
    found = run.encoder(rows, torch.cat([torch.zeros(1, dtype=torch.int64), ends]), times, request_times)[ends - 1]
    torch.set_num_threads(threads)
    return torch.nn.functional.normalize(found, dim=1) if run.config.loss.similarity == "cosine" else found


def candidates(run):
    rows = run.table
    return torch.nn.functional.normalize(rows, dim=1) if run.config.loss.similarity == "cosine" else rows


def ranks(run, part, request_time, filter_seen):
    """(rank or None, history length) of every user with a target, counted one candidate after another."""
    ends = [(user, len(user[1]) - (1 if part == "test" else 2)) for user in run.histories]
    ends = [(user, at) for user, at in ends if at >= 1]
    back = 0 if request_time == "target" else 1
    users = [(i[:at], t[:at], a and a[:at], t[at - back]) for (_, i, t, a), at in ends]
    table, found = candidates(run).double(), []
    all_scores = (vectors(run, users).double() @ table.T).tolist()
    for ((_, items, _, _), at), scores in zip(ends, all_scores, strict=True):
        target = items[at]
        if not run.known[target]:
            found.append((None, at))
            continue
        seen = set(items[:at]) if filter_seen else set()
        others = [i for i in np.flatnonzero(run.known).tolist() if i != target and i not in seen]
        # equal rows are ties, whatever the rounding
        tied = (table == table[target]).all(1).tolist()
        found.append((1 + sum(scores[i] > scores[target] and not tied[i] for i in others), at))
    return found


def metrics(found):
    n = len(found)
    known = [rank for rank, _ in found if rank is not None]
    result = {f"hr@{k}": sum(r <= k for r in known) / n for k in CUTS}
    result |= {f"ndcg@{k}": sum(1 / math.log2(r + 1) for r in known if r <= k) / n for k in CUTS}
    return result | {"mrr": sum(1 / r for r in known) / n, "users": n, "unknown_targets": n - len(known)}


KINDS = ("by_history_length", "by_repeats", "by_distance")


def bucketed(run, found):
    """Metrics of everybody, and of the test targets' users by history, counted user by user."""
    groups = {kind: {} for kind in KINDS}
    histories = [items for _, items, *_ in run.histories if len(items) > 1]
    for (*items, target), each in zip(histories, found, strict=True):
        known = [item for item in items if run.known[item]]
        share = (len(known) - len(set(known))) / max(1, len(known))
        back = items[::-1].index(target) + 1 if target in items else None
        names = (
            next((f"<={bound}" for bound in BUCKETS if len(items) <= bound), ">5000"),
            next(name for name in ("0", "<=0.25", "<=0.5", "<=0.75", "<=1") if share <= float(name.strip("<="))),
            ("1-10" if back <= 10 else "11-100") if back else "never",  # no history is longer
        )
        for kind, name in zip(KINDS, names if run.known[target] else (*names[:2], "unknown"), strict=True):
            groups[kind].setdefault(name, []).append(each)
    by_name = {kind: {name: metrics(group) for name, group in each.items()} for kind, each in groups.items()}
    return {**metrics(found), **by_name}
