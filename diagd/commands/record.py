"""Record gameplay with actions from ViZDoom.

diagd record --out gameplay --clips 400 --first-seed 0
"""

from diagd.data.recorders.doom import RecordOptions, record_clips
from diagd.system import only_writer


def main(options: RecordOptions) -> dict[str, int]:
    """Record the clips that are not there yet."""
    with only_writer(options.out):
        return record_clips(options)
