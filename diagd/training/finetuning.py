"""Diagonal finetuning: teach a model what it sees while it decodes along diagonals.

A model trained in raster order has never predicted a token whose left neighbours of the row above
are there and the right ones are not, nor one at a row's start behind a stand-in. A short training
under exactly that visibility (arXiv:2503.14070, section 3.3; `diagd.decoding.teacher_forcing`)
closes much of the gap. It is the loop of `diagd train`; only the lanes and the mask differ.

diagd finetune --init doom --tokens tokens/train --out doom-any
diagd finetune --init doom --tokens tokens --out doom-k1 --strategy "k=1"
"""

from typing import Any

from diagd.console import make_console
from diagd.families.checkpoints import load_model, model_path
from diagd.training.loop import read_clips
from diagd.training.mixture import begin_run, next_steps
from diagd.training.options import FinetuneOptions
from diagd.training.setup import check_fit


def finetune(options: FinetuneOptions) -> dict[str, Any]:
    """Finetune to the last step, from the newest checkpoint if there is one; report the losses."""
    clips, held_out = read_clips(options)
    model = load_model(options.init)
    check_fit(options.init, model.config, clips)
    max_frames = model.config.frames_held
    if options.window is None and options.frames > max_frames:
        raise ValueError(
            f"frames must be at most {max_frames}, which the model holds, got {options.frames}; "
            f"with --window {max_frames} there may be more"
        )
    if options.window is not None and not model.relative_positions:
        raise ValueError(
            f"window: {options.init} knows absolute positions, so nothing may outgrow its "
            f"context of {max_frames} frames: leave it out"
        )
    if options.window not in (None, max_frames):
        raise ValueError(
            f"window must be {max_frames}, the frames that {options.init} holds and its "
            f"streams see, got {options.window}"
        )
    run, loss = begin_run("finetune", options, clips, model, model_path(options.init))
    run.train(loss)
    report = {"steps": run.step} | ({} if held_out is None else loss.validate(run, held_out))
    console = make_console(run.accelerator.is_main_process)
    console.print(next_steps(options.out, options.tokens))
    return report
