"""What Prometheus sees of a service."""

from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from fuxi_torchrec.serving.recommender import Recommender


class ServiceMetrics:
    """Counters and gauges of one service, in a registry of their own."""

    def __init__(self, recommender: Recommender) -> None:
        self.registry = CollectorRegistry()
        named: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("fuxi_requests", "Requests", ["path", "status"], **named)
        self.seconds = Histogram(
            "fuxi_request_seconds",
            "Time to answer",
            ["path"],
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
            **named,
        )
        self.batch = Histogram(
            "fuxi_batch_size", "Requests worked on together", ["what"], buckets=(1, 2, 4, 8, 16, 32, 64, 128), **named
        )
        self.events = Counter("fuxi_events", "Events received", ["outcome"], **named)
        self.forgotten = Counter("fuxi_forgotten_users", "Users forgotten", **named)
        self.unknown = Counter("fuxi_unknown_users", "Answers for unknown users", **named)
        self.dropped = Counter("fuxi_dropped_connections", "Connections that were ended", ["reason"], **named)
        version = Gauge("fuxi_export", "The export that answers", ["model_id", "as_of"], **named)
        version.labels(recommender.manifest.model_id, str(recommender.manifest.as_of)).set(1)
        for name, what in (
            ("cached_states", "States in memory"),
            ("recent_events", "Events since the export, in memory"),
            ("max_recent_events", "How many of them there may be"),
            ("damaged_states", "States found damaged and encoded again"),
            ("log_bytes", "Size of the append log"),
            ("log_failed", "Whether nothing can be appended any more"),
        ):
            Gauge(f"fuxi_{name}", what, **named).set_function(partial(_read, recommender, name))

    def observe(self, path: str, status: int, seconds: float) -> None:
        self.requests.labels(path, str(status)).inc()
        self.seconds.labels(path).observe(seconds)


def _read(recommender: Recommender, name: str) -> float:
    return float(recommender.info()[name])
