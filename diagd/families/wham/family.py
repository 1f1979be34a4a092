"""WHAM: Microsoft's model of a game played with a gamepad."""

from diagd.families.defaults import GenerationDefaults
from diagd.families.family import Checkpoint, Family, RecordingFormat, TokenizerFolder
from diagd.families.wham.actions import WHAMActions
from diagd.families.wham.clips import NPZ_FPS, npz_actions, npz_frames, npz_length
from diagd.families.wham.presets import PRESETS
from diagd.families.wham.tokenizer import WHAM_KIND, WHAMTokenizer, wham_tokenizer_from_weights
from diagd.families.wham.weights import RELEASED, frame_size_px, head_size


def _tokenizer(found: Checkpoint) -> WHAMTokenizer:
    """Take the image tokenizer out of the checkpoint."""
    height_px, width_px = frame_size_px(found.source)
    return wham_tokenizer_from_weights(
        found.source.tensors, height_px, width_px, head_size(found.source)
    )


def _defaults(found: Checkpoint) -> GenerationDefaults:
    """Say what WHAM's own loop does: a full context drops its oldest frame before each new one."""
    config = found.config
    held = config.max_positions // (config.tokens_per_frame + config.num_action_tokens) - 1
    held = max(1, held)  # a frame that does not fit is refused where it is asked for
    return GenerationDefaults(
        fps=float(NPZ_FPS),
        context_frames=held,
        num_frames=10,
        temperature=0.9,
        top_p=None,
        exclusive_top_p=True,
        keep_frames=held,
        first_id=1,
    )


WHAM = Family(
    name="WHAM",
    licence="Microsoft Research License: research without revenue only, no redistribution",
    released=RELEASED,
    tokenizer=_tokenizer,
    tokenizer_folder=TokenizerFolder(WHAMTokenizer.from_pretrained, kind=WHAM_KIND),
    actions=WHAMActions(),
    recordings=RecordingFormat(
        suffix=".npz",
        rows="leaving",
        length=lambda path: (npz_length(path), NPZ_FPS),
        frames=npz_frames,
        actions=npz_actions,
    ),
    defaults=_defaults,
    presets=PRESETS,
)
