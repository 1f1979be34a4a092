"""Make accelerate shard models over CPUs as it does over GPUs; as a script, this is `diagd`.

accelerate has FSDP for GPUs only: it passes over the plugin where there is none, which is undone
here. All else is what runs on GPUs: runs/fsdp.yaml, accelerate's FSDP2, torch's `fully_shard`, the
loop of training; gloo stands in for NCCL.

    accelerate launch --config_file runs/fsdp.yaml --num_processes 2 tests/training/sharded.py \\
        finetune --init DIR ...
"""

from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from diagd.cli import main

_before = AcceleratorState.__init__


def with_plugin(
    self: AcceleratorState,
    *given: Any,
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
    **more: Any,
) -> None:
    """Make the state of a process; with a plugin, one that shards."""
    _before(self, *given, fsdp_plugin=fsdp_plugin, **more)
    if fsdp_plugin is not None:
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP


if __name__ == "__main__":
    AcceleratorState.__init__ = with_plugin
    main()
