"""Metrics for Prometheus: requests are counted as they end, the model's state is read on demand."""

from collections.abc import Iterator
from functools import partial

import psutil
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from diagd.web.serve.scheduler import Scheduler

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)


class Metrics(Collector):
    """Counts of one server since its start."""

    def __init__(self) -> None:
        self.scheduler: Scheduler | None = None  # of the model, once it is loaded here
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, buckets=SECONDS, registry=self.registry)
        self.requests = counter("diagd_requests", "requests completed", ["route", "status"])
        self.seconds = histogram("diagd_request_seconds", "from request to end", ["route"])
        self.first_picture = histogram(
            "diagd_first_picture_seconds", "from request to the first picture or preview"
        )
        self.registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "diagd_resident_bytes", "memory of the process", psutil.Process().memory_info().rss
        )
        if (scheduler := self.scheduler) is None:
            return
        steps, batch = scheduler.batch.num_steps, scheduler.batch
        yield CounterMetricFamily("diagd_steps", "forward passes", steps)
        yield CounterMetricFamily("diagd_tokens", "visual tokens generated", scheduler.num_tokens)
        yield CounterMetricFamily(
            "diagd_frames", "images and frames generated", scheduler.num_frames
        )
        yield GaugeMetricFamily("diagd_waiting", "images and videos queued", scheduler.num_waiting)
        yield GaugeMetricFamily(
            "diagd_running", "images and videos in the batch", len(scheduler.running)
        )
        yield GaugeMetricFamily("diagd_rows", "sequences of the batch", batch.num_sequences)
        yield GaugeMetricFamily("diagd_rows_in_use", "sequences in use", scheduler.rows_in_use)
