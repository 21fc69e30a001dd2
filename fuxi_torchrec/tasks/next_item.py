"""The next item: a softmax over its score and those of candidates."""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from fuxi_torchrec.encoders.base import Explanation, setting
from fuxi_torchrec.events.hashing import mix
from fuxi_torchrec.options import check_bounds
from fuxi_torchrec.tasks.base import Correction, Events, ItemSet, Metrics, TargetMaker, Targets, Task
from fuxi_torchrec.tasks.explain import bias_curves
from fuxi_torchrec.tasks.rank_metrics import RankMetrics
from fuxi_torchrec.tasks.repeat_softmax import Compared, repeat_softmax
from fuxi_torchrec.tasks.repeats import Entries, RepeatBias, RepeatsConfig
from fuxi_torchrec.tasks.samplers import SAMPLERS, Candidates, Draw, Sampler
from fuxi_torchrec.tasks.softmax import LOGITS, candidate_softmax, position_softmax, scaled_items, scaled_queries
from fuxi_torchrec.tasks.window_state import WindowState
from fuxi_torchrec.tasks.windows import find_windows

if TYPE_CHECKING:
    Negatives = str
else:
    Negatives = Literal[tuple(SAMPLERS)]

Weighting = Literal["position", "user", "sqrt"]


@dataclass(frozen=True)
class LossConfig:
    """Softmax over the next item's score and those of negatives."""

    negatives: Negatives = setting(
        "shared", "one pool a step; per position; all items; or this rank's targets with logQ"
    )
    num_negatives: int = setting(1024, "shared: of the pool; uniform: of each position", least=1, most=2**24)
    similarity: Literal["cosine", "dot"] = setting("cosine", "of queries and items, over the temperature")
    temperature: float = setting(0.05, "divides the scores", above=0)
    weighting: Weighting = setting("position", "a sequence of n targets weighs n, 1, or the root of n")
    same_time: float = setting(1.0, "weight of targets at the time of the event before them: of one basket", least=0)

    def __post_init__(self) -> None:
        check_bounds(self, named=str)

    @property
    def sampler(self) -> Sampler:
        return SAMPLERS[self.negatives](self.num_negatives)


class NextItem(Task):
    """Trained on all positions of a history at once, ranked by the score of its last."""

    shown_metrics = ("hr@10", "ndcg@10", "hr@50", "mrr")

    def __init__(self, config: LossConfig, repeats: RepeatsConfig | None = None, dim: int = 0) -> None:
        super().__init__()
        self.config, self.sampler = config, config.sampler
        self.repeats = RepeatBias(repeats, dim) if repeats is not None and repeats.window else None
        self.needs_target_counts = self.sampler.needs_target_counts

    def target_maker(self, items: ItemSet, seed: int) -> TargetMaker:
        repeats = RepeatsConfig() if self.repeats is None else self.repeats.config
        return NextItemTargets(self.sampler, self.config.weighting, items, seed, repeats, self.config.same_time)

    def forward(self, outputs_PD: Tensor, item_rows_UD: Tensor, targets: Targets) -> dict[str, Tensor]:
        similarity, items, constants = self.config.similarity, targets.items, targets.constants
        queries_PD = scaled_queries(outputs_PD, similarity, self.config.temperature)
        rows_UD = scaled_items(item_rows_UD, similarity)
        if self.repeats is not None:
            loss = self._with_repeats(self.repeats, scaled_items(outputs_PD, similarity), rows_UD, targets)
        elif items["candidates"].ndim == 2:
            loss = position_softmax(queries_PD, items["targets"], rows_UD, items["candidates"], targets.weights)
        else:
            loss = candidate_softmax(
                queries_PD,
                rows_UD.index_select(0, items["targets"]),
                rows_UD.index_select(0, items["candidates"]),
                constants.get("log_weights"),
                constants["target_column"],
                targets.weights,
            )
        return {"loss": loss}

    def _with_repeats(self, repeats: RepeatBias, y_PD: Tensor, rows_UD: Tensor, targets: Targets) -> Tensor:
        items, constants = targets.items, targets.constants
        last_PW, drawn = constants["window"].long(), items["candidates"]
        about = (constants[name] for name in ("window_counts", "window_gaps", "window_times", "window_request_times"))
        entries = Entries.of(last_PW, targets.positions, *about)
        rows_PW = items["inputs"].index_select(0, last_PW.clamp(min=0).flatten()).view(last_PW.shape)
        stands_for, each_own = constants["log_stands_for"], drawn.ndim == 2
        compared = Compared(
            targets_P=items["targets"],
            window_PW=torch.where(entries.there, rows_PW, -1),
            pool_M=drawn.new_zeros(0) if each_own else drawn,
            log_weights_M=None if each_own else constants.get("log_weights", drawn.new_zeros(len(drawn))) + stands_for,
            own_PK=drawn if each_own else drawn.new_zeros(len(y_PD), 0),
            own_log_weight=stands_for,
        )
        queries_PD = y_PD / self.config.temperature
        shifted_PD = queries_PD + repeats.shift(y_PD)
        return repeat_softmax(queries_PD, shifted_PD, rows_UD, repeats(y_PD, entries), compared, targets.weights)

    def metrics(self) -> Metrics:
        return RankMetrics()

    def lookups(self, events: int, items: int) -> int:
        return self.sampler.lookups(events, items)

    def loss_elements(self, lookups: int, events: int, dim: int) -> int:
        """Of the logits, or of the candidates' rows where those are more."""
        candidates = self.config.num_negatives if self.sampler.per_position else lookups - events
        window = 0 if self.repeats is None else 16 * events * self.repeats.config.window  # int64 and float32, kept
        return max(LOGITS, dim * candidates) + window

    def correction(self, events: Events, outputs_BD: Tensor, request_times: Tensor) -> Correction | None:
        """The bias of each user's window."""
        if self.repeats is None:
            return None
        items, offsets, times = (part.numpy() for part in (events.items, events.offsets, events.timestamps))
        windows = WindowState.of(items, offsets, times, self.repeats.config.window)
        y_BD = scaled_items(outputs_BD, self.config.similarity)
        return windows.correction(self.repeats, events.offsets.diff(), y_BD, request_times, self.config.temperature)

    def exported(self) -> dict[str, Any]:
        about = {"similarity": self.config.similarity, "temperature": self.config.temperature}
        return about if self.repeats is None else {**about, "repeats": asdict(self.repeats.config)}

    def exported_weights(self) -> dict[str, Tensor]:
        return {} if self.repeats is None else self.repeats.state_dict()

    def explain(self, per_second: int) -> Explanation | None:
        return None if self.repeats is None else bias_curves(self.repeats, per_second)


@dataclass(frozen=True)
class NextItemTargets:
    """Makes the targets of a micro-batch: every event with a weight predicts the item after it."""

    sampler: Sampler
    weighting: Weighting
    items: ItemSet
    seed: int
    repeats: RepeatsConfig = field(default_factory=RepeatsConfig)  # of the window before each target that it is told of
    same_time: float = 1.0

    def __call__(self, epoch: int, step: int, events: Events) -> Targets:
        weights = sequence_weights(events, self.weighting, self.same_time)
        positions = torch.nonzero(weights > 0).squeeze(1)
        found = self.sampler.draw(self.items, Draw(self.seed, epoch, step, events, positions))
        targets = compared(events, positions, weights[positions], found)
        if not self.repeats.window:
            return targets
        times = asked_at_last(events, request_times(events), self.repeats.at_last, self.seed, epoch)
        targets = with_windows(targets, events, self.repeats.window, times)
        stands_for = torch.tensor(math.log(self.sampler.stands_for(self.items)))
        return replace(targets, constants=targets.constants | {"log_stands_for": stands_for})


def compared(events: Events, positions: Tensor, weights: Tensor, candidates: Candidates) -> Targets:
    """Positions whose targets are compared with candidates."""
    targets, pool = events.targets[positions], candidates.ids
    items = {"targets": targets, "candidates": torch.from_numpy(pool)}
    constants = {}
    if candidates.log_weights is not None:
        constants["log_weights"] = torch.from_numpy(candidates.log_weights)
    if pool.ndim == 1:  # where the pool holds the position's own target, −1 if it does not
        place = np.minimum(np.searchsorted(pool, targets.numpy()), max(len(pool) - 1, 0))
        own = pool[place] == targets.numpy() if len(pool) else np.zeros(len(place), bool)
        constants["target_column"] = torch.from_numpy(np.where(own, place, -1))
    return Targets(positions, weights, items, constants)


def with_windows(targets: Targets, events: Events, width: int, times: Tensor) -> Targets:
    """With the last distinct items before each target, of the events that the encoder reads, queried at ``times``."""
    found = find_windows(events.items.numpy(), events.offsets.numpy(), width, targets.positions.numpy())
    constants = {
        "window": torch.from_numpy(np.ascontiguousarray(found.last, np.int32)),
        "window_counts": torch.from_numpy(found.counts),
        "window_gaps": torch.from_numpy(found.gaps(np.arange(len(found.previous)))),
        "window_times": events.timestamps,
        "window_request_times": times[targets.positions],
    }
    return replace(targets, items=targets.items | {"inputs": events.items}, constants=targets.constants | constants)


def request_times(events: Events) -> Tensor:
    """(T,) when each event's output is queried: at the time of the event after it."""
    times = events.timestamps.roll(-1)
    some = events.offsets.diff() > 0
    times[events.offsets[1:][some] - 1] = events.request_timestamps[some]
    return times


def asked_at_last(events: Events, times: Tensor, share: float, seed: int, epoch: int) -> Tensor:
    """The request times, for a share of the events their own: by user, time and item, whatever the rank."""
    user = np.repeat(events.users.numpy(), events.offsets.diff().numpy())
    bits = mix(seed, epoch, user, events.timestamps.numpy(), events.items.numpy())
    return torch.where(torch.from_numpy((bits >> np.uint64(11)) < share * 2.0**53), events.timestamps, times)


def sequence_weights(events: Events, weighting: Weighting, same_time: float = 1.0) -> Tensor:
    """(T,) weights of the targets: a sequence of n targets weighs n (position), 1 (user) or the root of n (sqrt).

    Args:
        same_time: how much targets at the time of the event before them weigh, beside others.
    """
    weights = events.target_weights
    if same_time != 1.0:
        weights = torch.where(request_times(events) == events.timestamps, same_time * weights, weights)
    if weighting == "position":
        return weights
    count = len(events.users)
    sequence = torch.repeat_interleave(torch.arange(count), events.offsets.diff())
    total = torch.zeros(count).index_add_(0, sequence, weights).clamp(min=1e-12)
    return weights / (total if weighting == "user" else total.sqrt())[sequence]
