"""Flags that several commands share."""

from typing import Annotated

import tyro

RowLag = Annotated[int, tyro.conf.arg(aliases=["-k"])]
OptionalRowLag = Annotated[int | None, tyro.conf.arg(aliases=["-k"])]
RowLags = Annotated[tuple[int, ...], tyro.conf.arg(aliases=["-k"])]
FrameLag = Annotated[int | None, tyro.conf.arg(aliases=["-d"])]
