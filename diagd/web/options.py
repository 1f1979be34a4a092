"""Options that servers share: who may ask, and how many processes answer."""

from dataclasses import dataclass
from pathlib import Path

from diagd.checks import check_at_least
from diagd.files import require_file

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, kw_only=True)
class AccessFlags:
    """The address of a server, and the keys that it asks for."""

    host: str = "127.0.0.1"  # address to listen on; others need keys, or --allow-anyone
    allow_host: tuple[str, ...] = ()  # additional host names of this server
    allow_anyone: bool = False  # serve other machines without keys
    api_key: str | None = None  # required of clients; visible to other users of this machine
    api_keys: Path | None = None  # file of keys, one per line

    def __post_init__(self) -> None:
        has_keys = self.api_key is not None or self.api_keys is not None
        if self.host not in LOOPBACK and not (has_keys or self.allow_anyone):
            raise ValueError(f"host {self.host} needs --api-key or --api-keys, or --allow-anyone")
        self.keys()

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


@dataclass(frozen=True, kw_only=True)
class ReplicaFlags:
    """Processes with the model behind one server."""

    replicas: int = 1  # number of processes, each with the model (Ray Serve)
    replica_cpus: float = 1  # CPUs per replica
    replica_gpus: float = 0  # GPUs per replica
    # address of a Ray cluster, such as ray://head:10001; default: start one
    address: str | None = None

    def __post_init__(self) -> None:
        check_at_least(self, replicas=1, replica_cpus=0, replica_gpus=0)

    @property
    def is_this_process(self) -> bool:
        return self.replicas == 1 and self.address is None
