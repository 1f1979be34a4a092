"""MineWorld: Microsoft's model of Minecraft, and other LLaMAs over visual tokens and actions."""

from diagd.families.defaults import GenerationDefaults
from diagd.families.family import Family
from diagd.families.mineworld.actions import MinecraftActions
from diagd.families.mineworld.presets import PRESETS
from diagd.families.mineworld.tokenizer import tokenizer_of
from diagd.families.mineworld.weights import RELEASED

DEFAULTS = GenerationDefaults(fps=20, context_frames=1, num_frames=15, top_p=0.8)

MINEWORLD = Family(
    name="MineWorld",
    licence="code: MIT; weights: taken down in May 2025",
    released=RELEASED,
    tokenizer=tokenizer_of,
    actions=MinecraftActions(),
    defaults=lambda found: DEFAULTS,
    presets=PRESETS,
)
