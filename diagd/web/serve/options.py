"""Options of `diagd serve`."""

from dataclasses import dataclass
from pathlib import Path

from diagd.checks import check_at_least, check_values
from diagd.files import require_file
from diagd.pipeline.options import AdapterFlag, MachineFlags

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ServeOptions(AdapterFlag, MachineFlags):
    """Serve a model over HTTP: images by OpenAI's API, and continuations of videos.

    SIGTERM or Ctrl-C drains: running requests complete, new ones are refused; a second signal
    stops the server at once.
    """

    model: str = "doom"  # a bundled model, our folder, a released checkpoint (docs/models.md)
    host: str = "127.0.0.1"  # address to listen on; others need keys, or --allow-anyone
    port: int = 8422  # 0: any free port
    allow_host: tuple[str, ...] = ()  # additional host names of this server
    allow_anyone: bool = False  # serve other machines without keys
    api_key: str | None = None  # required of clients; visible to other users of this machine
    api_keys: Path | None = None  # file of keys, one per line
    cors: tuple[str, ...] = ()  # allowed origins of web pages, such as https://example.org
    root_path: str = ""  # path of this server behind a proxy, such as /images
    max_videos: int = 8  # images or videos generated at once
    max_waiting: int = 64  # images or videos in the queue; more are refused (429)
    max_prompt_tokens: int = 256  # per text
    max_frames: int = 64  # per video
    max_seconds: float = 600  # per request
    drain_seconds: float = 60  # for requests under way at shutdown
    replicas: int = 1  # number of processes, each with the model (Ray Serve)
    replica_cpus: float = 1  # CPUs per replica
    replica_gpus: float = 0  # GPUs per replica
    # address of a Ray cluster, such as ray://head:10001; default: start one
    address: str | None = None
    log_prompts: bool = False  # log prompts

    def __post_init__(self) -> None:
        check_at_least(self, max_videos=1, max_waiting=0, max_prompt_tokens=1, max_frames=1)
        check_at_least(self, replicas=1, replica_cpus=0, replica_gpus=0)
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
        has_keys = self.api_key is not None or self.api_keys is not None
        if self.host not in LOOPBACK and not (has_keys or self.allow_anyone):
            raise ValueError(f"host {self.host} needs --api-key or --api-keys, or --allow-anyone")
        self.keys()

    @property
    def is_this_process(self) -> bool:
        return self.replicas == 1 and self.address is None

    def keys(self) -> list[str]:
        """Return all keys; without any, no key is needed."""
        keys = [] if self.api_key is None else [self.api_key]
        if self.api_keys is not None:
            lines = (
                require_file(self.api_keys, "file of keys").read_text(encoding="utf-8").split("\n")
            )
            found = [line.strip() for line in lines]
            if not (found := [key for key in found if key and key[0] != "#"]):
                raise ValueError(f"{self.api_keys} has no key, expected one per line")
            keys += found
        for key in keys:
            if not (key.isascii() and key.isprintable() and " " not in key and len(key) >= 8):
                raise ValueError("key must have 8 or more printable characters, without spaces")
        return keys
