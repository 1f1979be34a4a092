"""The families of released models that diagd knows: one line each.

Loaders read `table.FAMILIES` when they are called; the first family that recognises a checkpoint
has it.
"""

from diagd.families.cosmos.family import COSMOS
from diagd.families.family import Family
from diagd.families.mineworld.family import MINEWORLD
from diagd.families.wham.family import WHAM

FAMILIES: tuple[Family, ...] = (
    WHAM,
    COSMOS,
    MINEWORLD,
)
