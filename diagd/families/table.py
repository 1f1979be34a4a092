"""The released families that diagd supports, one line each; the first match wins."""

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
    LLAMAGEN,  # before Cosmos, which has the same tensor names
    LLAMAGEN_T2I,
    COSMOS,
    JANUS,
    RYNNVLA,  # a WorldVLA, by its class name
    WORLDVLA,  # a Chameleon, by its tensors
    CHAMELEON,  # before MineWorld, which has the same tensor names
    EMU3,
    MINEWORLD,
)
