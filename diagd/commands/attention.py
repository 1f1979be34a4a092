"""Draw and count where a video model looks when it writes a frame (arXiv:2503.14070, section 4.3).

diagd attention                # the bundled model and its prompt
diagd attention --clips work/doom/heldout --layer 3
"""

from typing import Any

from diagd.attention.report import AttentionOptions, report_attention


def main(options: AttentionOptions) -> dict[str, Any]:
    """Measure, draw, report."""
    return report_attention(options)
