"""The released families that diagd knows, one line each; a checkpoint is the first one's to fit."""

from diagd.families.chameleon.images import CHAMELEON
from diagd.families.chameleon.robots import RYNNVLA, WORLDVLA
from diagd.families.cosmos import COSMOS
from diagd.families.emu3 import EMU3
from diagd.families.family import Family
from diagd.families.iris import IRIS
from diagd.families.janus import JANUS
from diagd.families.llamagen import LLAMAGEN, LLAMAGEN_T2I
from diagd.families.mineworld import MINEWORLD
from diagd.families.wham.convert import WHAM

FAMILIES: tuple[Family, ...] = (
    WHAM,
    IRIS,
    LLAMAGEN,  # before Cosmos, whose tensors are called alike
    LLAMAGEN_T2I,
    COSMOS,
    JANUS,
    RYNNVLA,  # a WorldVLA by its class's name
    WORLDVLA,  # a Chameleon by its tensors
    CHAMELEON,  # before MineWorld, whose tensors are called alike
    EMU3,
    MINEWORLD,
)
