"""The released families that diagd supports, one line each; the first match wins.

Installed packages add families after these: an entry point of the group `diagd.families` names a
`Family`.
"""

from importlib.metadata import entry_points

from diagd.families.chameleon.images import CHAMELEON
from diagd.families.chameleon.robots import RYNNVLA, WORLDVLA
from diagd.families.cosmos import COSMOS
from diagd.families.emu3 import EMU3
from diagd.families.emu35 import EMU35
from diagd.families.family import Family
from diagd.families.glm_image import GLM_IMAGE
from diagd.families.iris import IRIS
from diagd.families.janus import JANUS
from diagd.families.llamagen import LLAMAGEN, LLAMAGEN_T2I
from diagd.families.mammothmoda2 import MAMMOTHMODA2
from diagd.families.mineworld import MINEWORLD
from diagd.families.wham.convert import WHAM
from diagd.files import MISFITS, naming

OURS: tuple[Family, ...] = (
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
    EMU35,
    GLM_IMAGE,
    MAMMOTHMODA2,
    MINEWORLD,
)


def with_installed(ours: tuple[Family, ...]) -> tuple[Family, ...]:
    """Return families and those of installed packages, or raise ValueError naming a broken one."""
    families = list(ours)
    for point in sorted(entry_points(group="diagd.families"), key=lambda one: one.name):
        where = f"family {point.name} ({point.value}) of an installed package"
        with naming(where, (*MISFITS, ImportError)):
            family = point.load()
        if not isinstance(family, Family):
            raise ValueError(f"{where}: expected a Family, got {type(family).__name__}")
        if family.name in {one.name for one in families}:
            raise ValueError(f"{where}: there is a family named {family.name} already")
        families.append(family)
    return tuple(families)


FAMILIES = with_installed(OURS)
