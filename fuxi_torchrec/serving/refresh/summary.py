"""What a refresh did, counted and timed."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Summary:
    """What a refresh did."""

    output: str
    as_of: int
    events: int = 0
    applied_before: bool = False
    already_done: bool = False
    late_events: int = 0
    covered_events: int = 0
    added_items: int = 0
    unknown_items: int = 0
    rare_items: int = 0
    bad_rows: dict[str, int] = field(default_factory=dict)
    touched_users: int = 0
    new_users: int = 0
    requeried_users: int = 0
    encoded_users: int = 0
    reanchored_users: int = 0
    damaged_states: int = 0
    forgotten_users: int = 0
    forgotten_events: int = 0
    unknown_forgotten: int = 0
    changed_features: int = 0
    unknown_values: int = 0
    parts_rewritten: int = 0
    parts_linked: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Count the time inside, unless there is an error."""
        began = time.perf_counter()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - began

    def lines(self) -> Iterator[str]:
        if self.already_done:
            yield f"{self.output} holds this refresh already: nothing was done"
            return
        yield f"{self.output}: as of {self.as_of}, {self.events:,} events"
        if self.applied_before:
            yield "these events are part of the export already: none was applied again"
        yield (
            f"users: {self.touched_users:,} touched, {self.new_users:,} of them new, {self.requeried_users:,} queried "
            f"again, {self.encoded_users:,} encoded from their history, {self.reanchored_users:,} with a new anchor"
        )
        for count, what in (
            (self.late_events, "late events left out"),
            (self.covered_events, "events at their user's last time left out, which the export has"),
            (self.added_items, "items that were added to the store"),
            (self.unknown_items, "events of items that the model does not know"),
            (self.rare_items, "events of rare items left out"),
            (sum(self.bad_rows.values()), "bad rows left out"),
            (self.damaged_states, "damaged states encoded again"),
            (self.forgotten_users, "users forgotten"),
            (self.forgotten_events, "events of forgotten users left out"),
            (self.unknown_forgotten, "users to forget that are not there"),
            (self.changed_features, "users with features of the file"),
            (self.unknown_values, "values of features that the model has no row for"),
        ):
            if count:
                yield f"{count:,} {what}"
        yield f"parts: {self.parts_rewritten} rewritten, {self.parts_linked} linked"
        yield ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
