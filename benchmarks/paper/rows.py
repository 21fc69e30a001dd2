"""The rows of docs/paper.md: which model, on which set, for how many minutes of processor time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.encoders import NAMES
from benchmarks.paper import sizes
from benchmarks.rows import Row
from fuxi_torchrec.encoders import kinds

CONFIGS = {
    "ml-1m": "configs/paper/ml_1m.yaml",
    "gitlog": "configs/paper/gitlog.yaml",
    "complete-journey": "configs/paper/complete_journey.yaml",
}
# a training for a choice leaves the validation events out; the one that is tested has them
CHOOSING = {"complete-journey": ("data.valid_from=1508544000",)}
FINAL = {"ml-1m": ("data.fit_on_valid=true",), "gitlog": ("data.fit_on_valid=true",)}
GRID = tuple((lr, dropout) for lr in (1e-3, 3e-3) for dropout in (0.15, 0.35))
SHARE = 0.25  # of a row's budget, for each point of the grid

SECONDS = (6, 15, 30, 60, 120, 300, 900, 3600)  # ratings come in pages, some seconds apart
HOURS = (60, 600, 3600, 21600, 86400, 604800, 2592000, 31536000)
# what all encoders of a set have in common
SHAPES: dict[str, dict[str, Any]] = {
    "ml-1m": {"dim": 128, "layers": 2, "heads": 4, "length": 200, "periods": SECONDS},
    "gitlog": {"dim": 64, "layers": 2, "heads": 4, "length": 1024, "periods": HOURS},
    "complete-journey": {"dim": 64, "layers": 2, "heads": 4, "length": 512, "periods": HOURS},
}


@dataclass(frozen=True)
class Timed(Row):
    """A row with a budget.

    Attributes:
        minutes: of processor time, for the training that is ranked; the schedule ends with it.
        tuned: learning rate and dropout are chosen on the validation events first, a quarter of the budget each.
        against: the row that it is compared with, user by user.
        file: the configuration, where it is not the set's.
    """

    minutes: float = 6.0
    tuned: bool = False
    against: str = ""
    file: str = ""

    @property
    def config(self) -> str:
        return self.file or CONFIGS[self.set]

    def cost(self, minutes: float) -> float:
        """Of the row in all, the grid included."""
        return minutes * (1 + SHARE * len(GRID)) if self.tuned else minutes


def fuxi_linear(set: str, **changes: Any) -> dict[str, Any]:
    """FuXi-Linear's settings on a set."""
    shape = SHAPES[set]
    return {
        "dim": shape["dim"],
        "num_layers": shape["layers"],
        "num_heads": shape["heads"],
        "max_positions": shape["length"],
        "temporal_periods": shape["periods"],
        **changes,
    }


def model_of(kind: str, set: str) -> dict[str, Any]:
    """An encoder's settings in the comparison: as many parameters as FuXi-Linear has."""
    own = fuxi_linear(set)
    if kind == "fuxi_linear":
        return own
    shape = {name: value for name, value in SHAPES[set].items() if name != "periods"}
    return sizes.comparable(kind, wanted=sizes.parameters("fuxi_linear", own), **shape)


def comparison() -> list[Timed]:
    """Ten encoders on three sets; where items repeat, with the bias for repeats too."""
    rows = []
    for set in CONFIGS:
        for repeats in ((), ("task.repeats.window=512",)) if set != "ml-1m" else ((),):
            at = f"comparison-{set}{'-repeats' if repeats else ''}"
            for kind in ("fuxi_linear", *(each for each in kinds() if each != "fuxi_linear")):
                settings = (*sizes.overrides(kind, model_of(kind, set)), *repeats)
                against = "" if kind == "fuxi_linear" else f"{at}-fuxi_linear"
                rows.append(Timed(f"{at}-{kind}", at, set, NAMES[kind], settings, 1, "test", 5.0, True, against))
    return rows


# a study of FuXi-Linear alone has the settings that docs/results.md found, and ranks the validation events
CHOSEN = {
    "ml-1m": ("model.dropout=0.2", "optimizer.lr=2e-3", "optimizer.scalar_lr=1e-2"),
    "gitlog": ("model.dropout=0.3", "optimizer.lr=2e-3", "optimizer.scalar_lr=1e-2"),
}
STUDIED = ("ml-1m", "gitlog")


def own(
    study: str, set: str, name: str, what: str, more: Sequence[str] = (), minutes: float = 6.0, **changes: Any
) -> Timed:
    """A row of FuXi-Linear with something changed, beside the one with nothing changed."""
    settings = (*sizes.overrides("fuxi_linear", fuxi_linear(set, **changes)), *CHOSEN[set], *more)
    against = "" if study == "reference" else f"reference-{set}"
    return Timed(
        f"{study}-{set}-{name}".removesuffix("-"), study, set, what, settings, 1, "valid", minutes, False, against
    )


TEMPORAL = {
    "bucket": ("FuXi-α's buckets, n²", {"temporal": "bucket"}),
    "exp": ("FuXi-β's exponential, n²", {"temporal": "exp"}),
    "pow": ("FuXi-β's power, n²", {"temporal": "pow"}),
    "hstu": ("HSTU's bias, n²", {"temporal": "hstu"}),
    "absolute": ("absolute sinusoidal embedding, n", {"temporal": "absolute"}),
    "scaled": ("scaled steps as TiSSD's, n", {"temporal": "scaled"}),
    "none": ("none", {"use_temporal": "false"}),
}
POSITIONAL = {
    "table": ("table of distances of FuXi-α and β, n²", {"positional": "table"}),
    "rope": ("RoPE, n", {"positional": "rope"}),
    "t5": ("T5's bias, n²", {"positional": "t5"}),
    "alibi": ("ALiBi, n", {"positional": "alibi"}),
    "none": ("none", {"use_positional": "false"}),
}
ABLATIONS = {
    "no-retention": ("without the retention channel", {"use_retention": "false"}),
    "no-phases": ("without the temporal queries and keys", {"temporal_phases": "false"}),
    "no-mix": ("without temporal α and β", {"temporal_mix": "false"}),
    "fixed-decay": ("temporal decays not learned", {"learn_temporal_decay": "false"}),
    "official": ("preset `official`", {"preset": "official"}),
}
SCALES = {
    2: (15, 300),
    4: (6, 30, 300, 3600),
    16: tuple(4 * 2**k for k in range(16)),
    32: tuple(4 + 3 * k * k for k in range(32)),
}
HYPER: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"scales-{n}": (f"H_t = {n}", {"temporal_periods": periods}) for n, periods in SCALES.items()},
    **{f"heads-{n}": (f"H = {n}", {"num_heads": n}) for n in (1, 2, 8, 16)},
    **{f"kernel-{n}": (f"d_p = {n}", {"kernel_dim": n}) for n in (8, 16, 64, 128)},
}
SCALING = {(64, 2): 4.0, (64, 4): 6.0, (128, 2): 10.0, (128, 4): 18.0, (192, 4): 36.0}  # minutes
LENGTHS = (64, 256, 1024, 4096, 16384)


def scaling() -> list[Timed]:
    """188K parameters and more: length 1,024, heads of 32 columns, d_FFN = 4d."""
    rows = []
    for (dim, layers), minutes in SCALING.items():
        changes = {"dim": dim, "num_layers": layers, "num_heads": dim // 32, "ffn_dim": 4 * dim}
        count = sizes.parameters("fuxi_linear", fuxi_linear("gitlog", **changes))
        row = own(
            "scaling",
            "gitlog",
            f"{dim}x{layers}",
            f"d = {dim}, L = {layers}, {count // 1000:,}K",
            (),
            minutes,
            **changes,
        )
        rows.append(row)
    return rows


def lengths() -> list[Timed]:
    """Histories of so many events, every target weighing the same."""
    by_position = "loss.weighting=position"
    return [
        own("length", "gitlog", str(n), f"{n:,} events", (f"batch.max_length={n}", by_position), max_positions=n)
        for n in LENGTHS
    ]


def variants(study: str, every: dict[str, tuple[str, dict[str, Any]]], sets: Sequence[str] = STUDIED) -> list[Timed]:
    """One thing changed at a time."""
    return [own(study, set, name, what, **changes) for set in sets for name, (what, changes) in every.items()]


ROWS: list[Timed] = [
    *comparison(),
    *(own("reference", set, "", "FuXi-Linear") for set in STUDIED),
    *variants("temporal", TEMPORAL),
    *variants("positional", POSITIONAL),
    *variants("ablations", ABLATIONS),
    *variants("hyper-parameters", HYPER, ["ml-1m"]),
    *scaling(),
    *lengths(),
]
