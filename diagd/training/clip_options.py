"""What `diagd check` and `diagd tokenize` are told."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from diagd.flags import OutputFolder
from diagd.tokenizers.options import TokenizerOptions


@dataclass(frozen=True)
class CheckOptions:
    """Check clips (NAME.mp4 with NAME.jsonl, one action a frame); problems end in exit code 2."""

    clips: Annotated[Path, tyro.conf.Positional]  # folder of clips


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions(TokenizerOptions):
    """Turn recorded clips into a folder that `diagd train` takes: tokens, tokenizer, scenes."""

    out: OutputFolder  # folder to write; a killed run goes on from here
    heldout: Path | None = None  # folder of held-out clips; default: a share of the clips
    heldout_share: float = 0.1  # which share: every tenth clip by name
    tokenizer: Path | None = None  # trained tokenizer to apply as it is, instead of training
    actions: Path | None = None  # actions.json with the order of actions; else as in the clips

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.heldout_share <= 0.5:
            raise ValueError(f"heldout_share must be in (0, 0.5], got {self.heldout_share}")
        if self.tokenizer is not None and self.init is not None:
            raise ValueError("--tokenizer is applied as it is; to train it further use --init")
