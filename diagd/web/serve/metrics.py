"""Metrics for Prometheus: requests are counted as they end, the rest is read when it is asked for."""

from collections.abc import Callable, Iterator

import psutil
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from diagd.web.serve.scheduler import Scheduler

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)


class Metrics(Collector):
    """Counts since the start, of one server.

    Args:
        scheduler: returns that of the model, once it is loaded.
    """

    def __init__(self, scheduler: Callable[[], Scheduler | None]) -> None:
        self.scheduler = scheduler
        self.registry = CollectorRegistry()
        given = {"registry": self.registry}
        labels = ["route", "status"]
        self.requests = Counter("diagd_requests", "requests that ended", labels, **given)
        self.seconds = Histogram(
            "diagd_request_seconds", "from request to end", ["route"], buckets=SECONDS, **given
        )
        self.first_picture = Histogram(
            "diagd_first_picture_seconds",
            "from request to the first picture, be it of a part",
            buckets=SECONDS,
            **given,
        )
        self.registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "diagd_resident_bytes", "memory of the process", psutil.Process().memory_info().rss
        )
        if (scheduler := self.scheduler()) is None:
            return
        steps, batch = scheduler.batch.num_steps, scheduler.batch
        yield CounterMetricFamily("diagd_steps", "forward passes, shared by many", steps)
        yield CounterMetricFamily("diagd_tokens", "visual tokens written", scheduler.num_tokens)
        yield CounterMetricFamily("diagd_frames", "images and frames written", scheduler.num_frames)
        yield GaugeMetricFamily("diagd_waiting", "images and videos in line", scheduler.num_waiting)
        yield GaugeMetricFamily("diagd_running", "of them written now", len(scheduler.running))
        yield GaugeMetricFamily("diagd_rows", "sequences of the batch", batch.num_sequences)
        yield GaugeMetricFamily("diagd_rows_in_use", "of them taken", scheduler.rows_in_use)
