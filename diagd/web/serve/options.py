"""Options of `diagd serve`."""

from dataclasses import dataclass

from diagd.checks import check_at_least, check_values
from diagd.pipeline.options import AdapterFlag, MachineFlags
from diagd.web.options import AccessFlags, ReplicaFlags


@dataclass(frozen=True)
class ServeOptions(ReplicaFlags, AccessFlags, AdapterFlag, MachineFlags):
    """Serve a model over HTTP: images by OpenAI's API, and continuations of videos.

    SIGTERM or Ctrl-C drains: running requests complete, new ones are refused; a second signal
    stops the server at once.
    """

    model: str = "doom"  # a bundled model, our folder, a released checkpoint (docs/models.md)
    port: int = 8422  # 0: any free port
    cors: tuple[str, ...] = ()  # allowed origins of web pages, such as https://example.org
    root_path: str = ""  # path of this server behind a proxy, such as /images
    max_videos: int = 8  # images or videos generated at once
    max_waiting: int = 64  # images or videos in the queue; more are refused (429)
    max_prompt_tokens: int = 256  # per text
    max_frames: int = 64  # per video
    max_seconds: float = 600  # per request
    drain_seconds: float = 60  # for requests under way at shutdown
    log_prompts: bool = False  # log prompts

    def __post_init__(self) -> None:
        check_at_least(self, max_videos=1, max_waiting=0, max_prompt_tokens=1, max_frames=1)
        for group in (ReplicaFlags, AccessFlags):
            group.__post_init__(self)
        check_values(
            self,
            ("max_seconds", 0 < self.max_seconds < float("inf"), "above 0"),
            ("drain_seconds", 0 <= self.drain_seconds < float("inf"), "at least 0"),
            (
                "root_path",
                self.root_path == "" or self.root_path[0] == "/",
                "a path such as /images",
            ),
        )
        for origin in self.cors:
            if not origin.startswith(("http://", "https://")) or origin.count("/") != 2:
                raise ValueError(
                    f"cors must be origins such as https://example.org, got {origin!r}"
                )
