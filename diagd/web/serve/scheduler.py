"""Schedule jobs, each some frames after a prompt, whose streams share the steps of one batch.

All decisions are made in the event loop. The model's thread runs turns: steps, until there is an
update to deliver, or a job was submitted or cancelled.
"""

import asyncio
import logging
import math
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from torch import Tensor

from diagd.decoding.engine import Batch, Stream
from diagd.decoding.generate_tokens import write_frames
from diagd.decoding.model import CausalModel
from diagd.decoding.sampling_options import SamplingOptions
from diagd.decoding.schedule import FrameFormat
from diagd.decoding.strategies.table import Strategy
from diagd.pipeline.previews import preview_due
from diagd.web.model_thread import tried
from diagd.web.serve.errors import ApiError

logger = logging.getLogger("diagd.serve")


class BusyError(Exception):
    """The queue is full; retry after so many seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__("too many requests are waiting")
        self.retry_after = retry_after


@dataclass(frozen=True, eq=False)
class Update:
    """A complete frame of a job, or a preview of one."""

    frame: int  # number of the frame
    tokens: Tensor  # (height, width) int64, on the CPU
    known: Tensor | None = None  # (height, width) bool, which tokens are written; None: all


class Updates:
    """Updates of the jobs of one request; only the newest preview of each is kept."""

    def __init__(self) -> None:
        self._untold, self._come = deque[tuple["Job | None", Update | Exception]](), asyncio.Event()

    def put(self, job: "Job | None", update: Update | Exception) -> None:
        if job is not None:
            stale = [one for one in self._untold if one[0] is job and _is_preview(one[1])]
            for one in stale:
                self._untold.remove(one)
        self._untold.append((job, update))
        self._come.set()

    async def take(self) -> tuple["Job", Update]:
        """Wait for the next update, or raise the error that ended the request."""
        while not self._untold:
            self._come.clear()
            await self._come.wait()
        job, update = self._untold.popleft()
        if isinstance(update, Exception):
            raise update
        assert job is not None
        return job, update


def _is_preview(update: Update | Exception) -> bool:
    return isinstance(update, Update) and update.known is not None


@dataclass(eq=False)
class Job:
    """Frames to generate after a prompt."""

    prompt: Tensor  # (P,) int64, ending with `context_frames` frames
    context_frames: int
    actions: Tensor  # (T, n) int64, conditioning tokens before each of T frames
    frame: FrameFormat
    strategy: Strategy
    sampling: SamplingOptions
    seed: int
    model: CausalModel  # the batch's, with the job's own guidance
    window: tuple[int, int | None]  # see `VideoGenerator.window`
    num_previews: int = 0  # of a single frame
    client: str = ""  # clients take turns
    stream: Stream | None = None  # while it runs
    num_frames: int = 0  # delivered so far
    previewed: int = 0
    started: float = 0.0
    updates: Updates = field(default_factory=Updates)  # shared by the jobs of a request
    number: int = 0  # within the request

    @property
    def num_sequences(self) -> int:
        return 1 + len(self.model.scales)

    @property
    def is_done(self) -> bool:
        return self.num_frames == len(self.actions)

    def start(self, batch: Batch) -> None:
        """Admit a stream to the batch, whose steps then prefill and decode it."""
        self.started = monotonic()
        max_slots, keep = self.window
        given = {"model": self.model, "max_slots": max_slots, "keep_frames": keep}
        self.stream = batch.admit(self.frame, self.sampling, self.seed, **given)
        self.stream.read(self.prompt, self.context_frames)
        write_frames(self.stream, self.strategy, self.actions)

    def stop(self) -> None:
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def look(self) -> Update | None:
        """Return the update that a step brought, if any; close the stream after the last frame."""
        stream = self.stream
        assert stream is not None
        if stream.num_taken < stream.num_whole:
            update = Update(self.num_frames, stream.take_frame().cpu())
            self.num_frames += 1
            if self.is_done:
                self.stop()
            return update
        counts = self.num_previews, self.previewed
        self.previewed, known = preview_due(stream, self.strategy, *counts)
        if known is None:
            return None
        return Update(self.num_frames, stream.frame_under_way().cpu(), known)


class Scheduler:
    """Runs as many jobs as fit in a batch at once; the others wait in a queue.

    Clients take turns, however much each asks for. The first job in the queue waits for enough free
    sequences and is not overtaken by smaller ones.

    Attributes:
        num_tokens, num_frames: generated so far.
    """

    def __init__(self, batch: Batch, thread: ThreadPoolExecutor, max_waiting: int) -> None:
        self.batch, self.thread, self.max_waiting = batch, thread, max_waiting
        self.line: dict[str, deque[Job]] = {}  # queued jobs by client, in the order of turns
        self.running: list[Job] = []
        self.gone: list[Job] = []  # cancelled while running
        self.num_tokens = self.num_frames = 0
        self.job_seconds = 1.0  # moving average
        self.wake, self.is_interrupted = asyncio.Event(), False

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.line.values()))

    @property
    def rows_in_use(self) -> int:
        return sum(job.num_sequences for job in self.running)

    def submit(self, jobs: list[Job]) -> None:
        """Queue all jobs of a request, or none.

        Raises:
            BusyError: the queue is too full for them now.
            ValueError: it is too short for them at any time.
        """
        rows, size = self.batch.num_sequences, jobs[0].num_sequences
        if len(jobs) > (longest := self.max_waiting + rows // size):
            raise ValueError(f"expected at most {longest} at once, got {len(jobs)}")
        waiting, free = self.num_waiting, (rows - self.rows_in_use) // size
        if waiting + len(jobs) > self.max_waiting + free:
            raise BusyError(math.ceil(self.job_seconds * (1 + waiting * size / rows)))
        for job in jobs:
            self.line.setdefault(job.client, deque()).append(job)
        self.interrupt()

    def cancel(self, job: Job) -> None:
        """Remove a job from the queue or the batch; nothing happens if it is done."""
        if job in self.running:
            self.gone.append(job)
            self.interrupt()
        elif job in (own := self.line.get(job.client, deque[Job]())):
            own.remove(job)
            if not own:
                del self.line[job.client]

    def interrupt(self) -> None:
        """End the current turn after its step."""
        self.is_interrupted = True
        self.wake.set()

    def _next(self) -> Job | None:
        """Take the next job if there is room for it, and move its client to the end."""
        for client, jobs in self.line.items():
            if self.batch.free_place(jobs[0].num_sequences) is None:
                return None
            del self.line[client]
            job = jobs.popleft()
            if jobs:
                self.line[client] = jobs
            return job
        return None

    async def run(self) -> None:
        in_thread = partial(asyncio.get_running_loop().run_in_executor, self.thread)
        while True:
            self.is_interrupted = False
            gone, self.gone = self.gone, []
            for job in gone:
                if job in self.running:  # else it was just completed
                    self.running.remove(job)
                    await in_thread(job.stop)
            while (job := self._next()) is not None:
                self.running.append(job)
                if (error := await in_thread(tried, partial(job.start, self.batch))) is not None:
                    await in_thread(job.stop)
                    self._tell([(job, error)], 400)
            if self.running:
                self._tell(await in_thread(self._turn))
            elif not (self.gone or self.line):
                self.wake.clear()
                await self.wake.wait()

    def _turn(self) -> list[tuple[Job, Update | Exception]]:
        """Run steps until there are updates."""
        news = list[tuple[Job, Update | Exception]]()
        while not news:
            failed = tried(self.batch.step)
            for job in self.running:
                update = failed or tried(job.look)
                if update is not None:
                    news.append((job, update))
            if self.is_interrupted:
                break
        for job, update in news:
            if isinstance(update, Exception):
                job.stop()
        return news

    def _tell(self, news: list[tuple[Job, Update | Exception]], status: int = 500) -> None:
        """Deliver updates; a ValueError becomes an `ApiError` of this status."""
        for job, update in news:
            if isinstance(update, Update) and not _is_preview(update):
                self.num_frames += 1
                self.num_tokens += update.tokens.numel()
            if job.stream is None and job in self.running:
                self.running.remove(job)
                self.job_seconds += 0.2 * (monotonic() - job.started - self.job_seconds)
            if isinstance(update, ValueError):
                update = ApiError(status, str(update))
            elif isinstance(update, Exception):
                logger.error("a job crashed", exc_info=update)
                update = ApiError(500, "decoding crashed")
            job.updates.put(job, update)
