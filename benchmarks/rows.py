"""The rows of docs/results.md: which runs there are on which set."""

from dataclasses import dataclass

# how each set is made; configurations look for it at data/NAME
SETS = {
    "ml-1m": "python -m pipelines.prepare ml-1m --input data/ml-1m-raw --output data/ml-1m",
    "gitlog": (
        "python -m pipelines.prepare events --input benchmarks/sets/gitlog-void.parquet --user-column user_id "
        "--item-column item_id --time-column timestamp --time-unit s --output data/gitlog"
    ),
    "complete-journey": (
        "python -m pipelines.prepare complete-journey --input pip --train-until 1511708329 "
        "--output data/complete-journey"
    ),
}
CONFIGS = {
    "ml-1m": "configs/ml_1m.yaml",
    "gitlog": "configs/gitlog.yaml",
    "complete-journey": "configs/complete_journey.yaml",
}
# what is ranked beside all targets among all candidates, by set: names and options of evaluate
WAYS = {
    "ml-1m": {"unseen": "--filter-seen"},
    "complete-journey": {"cold": "--targets cold", "new": "--targets cold --candidates cold"},
}
FINAL = "data.fit_on_valid=true"  # settings were chosen on the validation events, now they are trained on too


@dataclass(frozen=True)
class Row:
    """A training run and its evaluation.

    Attributes:
        name: of its run directory and of what came out.
        study: the table it stands in.
        set: the dataset.
        what: in the table's first column; rows that differ in their seed alone share it.
        settings: beside those of the set's configuration.
        processes: on one machine.
        split: whose targets are ranked.
    """

    name: str
    study: str
    set: str
    what: str
    settings: tuple[str, ...] = ()
    processes: int = 1
    split: str = "test"

    @property
    def config(self) -> str:
        """The set's configuration."""
        return CONFIGS[self.set]

    @property
    def ways(self) -> dict[str, str]:
        """Ways to ask, with the options of evaluate; cold items need features."""
        bare = BARE in self.settings
        return {"all": "", **({} if bare else WAYS.get(self.set, {}))}


def seeds(name: str, study: str, set: str, what: str, *settings: str, processes: int = 1, count: int = 3) -> list[Row]:
    """A final row: runs that differ in their seed."""
    final = () if set == "complete-journey" else (FINAL,)  # its settings were chosen with data.valid_from
    return [
        Row(f"{name}-s{seed}", study, set, what, (*final, *settings, f"seed={seed}"), processes)
        for seed in range(count)
    ]


BARE = "features.item={}"
# by name: what is left of the bias of items that come back, and the settings that do it
BIASES: dict[str, tuple[str, str]] = {
    "whole": ("whole", "task.repeats.without=[]"),
    "no-mix": ("without the hidden layer", "task.repeats.without=[mix]"),
    "no-user": ("without what depends on the user alone, and on user and item", "task.repeats.without=[user,items]"),
    "no-lead": ("without the lead", "task.repeats.without=[lead]"),
    "no-phase": ("without phases", "task.repeats.without=[phase]"),
    "no-tables": ("without the other tables", "task.repeats.without=[events_ago,items_ago,count,gap,since]"),
    "at-target": ("whole, every target asked for at its time", "task.repeats.at_last=0"),
    "none": ("no bias", "task.repeats={}"),
}
GIT_REPEATS = (  # negatives drawn: less than half the time of a softmax over all packages
    *("task.repeats.periods=[86400,604800]", "optimizer.scalar_lr=2e-2"),
    *("loss.negatives=shared", "loss.num_negatives=2048", "validation.every_epochs=null"),
)
GIT_4 = ("task.repeats.window=128", "model.dropout=0.4", "train.epochs=4")
GIT_8 = ("task.repeats.window=64", "model.dropout=0.5", "train.epochs=8")
BASKETS = (  # the first product of each basket is a target
    *("task.repeats.window=256", "task.repeats.periods=[86400,604800]", "optimizer.scalar_lr=2e-2"),
    *("train.epochs=2", "batch.events=4096", "loss.num_negatives=2048", "loss.same_time=0"),
)
NARROW = ("model.dim=64", "model.num_heads=2", "optimizer.lr=4e-3", "optimizer.scalar_lr=4e-3")
SHORT = ("train.epochs=2", "validation.every_epochs=null")
REPEATS_64 = "task.repeats.window=64"
BY_POSITION = "loss.weighting=position"
LENGTHS = (50, 200, 1024, 4096, 16384)


def length(events: int) -> tuple[str, str]:
    """Read histories of so many events, with a position for each."""
    return f"batch.max_length={events}", f"model.max_positions={events}"


# by name: what is changed, and the settings that do it
ABLATIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "whole": ("whole", ()),
    "no-temporal": ("without the temporal channel", ("model.use_temporal=false",)),
    "no-positional": ("without the positional channel", ("model.use_positional=false",)),
    "no-retention": ("without the retention channel", ("model.use_retention=false",)),
    "no-phases": ("without the temporal channel's queries and keys", ("model.temporal_phases=false",)),
    "official": ("preset `official`", ("model.preset=official",)),
    "uniform": ("128 uniform negatives, no full softmax", ("loss.negatives=uniform", "loss.num_negatives=128")),
}


def ablations(set: str, study: str, steps: dict[str, int]) -> list[Row]:
    """Rows of 15 minutes on one core: as many steps as each one has time for."""
    return [
        Row(
            f"{set}-ablation-{name}",
            study,
            set,
            ABLATIONS[name][0],
            (*ABLATIONS[name][1], "train.epochs=99", f"train.max_steps={limit}", "validation.every_epochs=null"),
            split="valid",
        )
        for name, limit in steps.items()
    ]


ROWS: list[Row] = [
    *seeds("ml-1m-small", "movielens", "ml-1m", "d = 64, 8 epochs, one process", *NARROW, "train.epochs=8"),
    *seeds("ml-1m", "movielens", "ml-1m", "d = 128, 14 epochs, one process"),
    *seeds(
        "ml-1m-hour",
        "movielens",
        "ml-1m",
        "d = 128, 42 epochs, two processes",
        "train.epochs=42",
        "model.dropout=0.3",
        processes=2,
    ),
    # validated as it goes, so not trained on the validation events: its best checkpoint is ranked
    Row(
        "ml-1m-long", "movielens", "ml-1m", "d = 128, 42 epochs, one process", ("train.epochs=42", "model.dropout=0.3")
    ),
    *(
        row
        for cut in ("windows", "recent")
        for events in (1024, 16384)
        for row in seeds(
            f"gitlog-{cut}-{events}",
            "gitlog",
            "gitlog",
            f"{cut}, {events:,}",
            f"batch.truncation={cut}",
            *length(events),
        )
    ),
    *seeds("gitlog-repeats", "gitlog-repeats", "gitlog", "window 128, 4 epochs", *GIT_REPEATS, *GIT_4),
    *seeds("gitlog-repeats-64", "gitlog-repeats", "gitlog", "window 64, 8 epochs", *GIT_REPEATS, *GIT_8),
    *(
        Row(
            f"gitlog-bias-{name}",
            "gitlog-biases",
            "gitlog",
            what,
            (*GIT_REPEATS, *GIT_8, "train.epochs=2", setting),
            split="valid",
        )
        for name, (what, setting) in BIASES.items()
    ),
    *seeds("ml-1m-short", "movielens-repeats", "ml-1m", "no repeats", *NARROW, *SHORT, count=1),
    *seeds("ml-1m-short-repeats", "movielens-repeats", "ml-1m", "window 64", *NARROW, *SHORT, REPEATS_64, count=1),
    *seeds("journey-new", "journey-new", "complete-journey", "five features", count=1),
    *seeds("journey-new-bare", "journey-new", "complete-journey", "no features", BARE, count=1),
    *seeds("journey", "journey", "complete-journey", "five features", *BASKETS),
    *seeds("journey-bare", "journey", "complete-journey", "no features", *BASKETS, BARE, count=1),
    *(
        # weighed by position: by sequence, windows of different lengths would weigh users differently
        Row(f"gitlog-length-{events}", "lengths", "gitlog", f"{events:,}", (FINAL, BY_POSITION, *length(events)), 1)
        for events in LENGTHS
    ),
    *ablations(
        "ml-1m",
        "movielens-ablations",
        {
            "whole": 6000,
            "no-temporal": 7700,
            "no-positional": 6800,
            "no-retention": 8000,
            "no-phases": 6000,
            "official": 6300,
            "uniform": 6000,
        },
    ),
    *ablations(
        "gitlog",
        "gitlog-ablations",
        {
            "whole": 6850,
            "no-temporal": 9150,
            "no-positional": 7650,
            "no-retention": 8550,
            "no-phases": 7300,
            "official": 7950,
        },
    ),
]
