"""Record gameplay with actions, from ViZDoom or any Gymnasium environment.

diagd record --out gameplay --clips 400 --first-seed 0
diagd record --gym MiniGrid-FourRooms-v0 --out clips
diagd record --gym CarRacing-v3 --policy racing:Driver --out clips
"""

from diagd.data.recorders.doom import open_doom
from diagd.data.recorders.gym import open_gym
from diagd.data.recorders.recording import RecordOptions, record_clips
from diagd.system import only_writer


def main(options: RecordOptions) -> dict[str, int]:
    """Record the clips that are not there yet."""
    with only_writer(options.out):
        return record_clips(options, open_gym if options.gym else open_doom)
