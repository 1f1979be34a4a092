"""Diagonal finetuning: teach a model what it sees while it decodes along diagonals.

A model trained in raster order has never predicted a token whose left neighbours of the row above
are there and the right ones are not, nor one at a row's start behind a stand-in. A short training
under exactly that visibility (arXiv:2503.14070, section 3.3; `diagd.decoding.teacher_forcing`)
closes much of the gap. It is the loop of `diagd train`; only the lanes and the mask differ.

diagd finetune --init doom --tokens tokens/train --out doom-any
diagd finetune --init doom --tokens tokens --out doom-k1 --strategies "k=1"
"""

from dataclasses import asdict
from typing import Any

from diagd.console import make_console
from diagd.families.checkpoints import load_model, model_path
from diagd.files import write_json
from diagd.training.loop import TrainingRun, read_clips
from diagd.training.mixture import MixtureLoss, corruption_of, views_of
from diagd.training.options import FinetuneOptions
from diagd.training.setup import check_fit, copy_parts, next_steps

RECORD_FILE = "finetune.json"


def finetune(options: FinetuneOptions) -> dict[str, Any]:
    """Finetune to the last step, from the newest checkpoint if there is one."""
    clips, held_out = read_clips(options)
    model = load_model(options.init)
    check_fit(options.init, model.config, clips)
    most = model.config.frames_held
    if options.window is None and options.frames > most:
        raise ValueError(
            f"frames must be at most {most}, which the model holds, got {options.frames}; "
            f"with --window {most} there may be more"
        )
    if options.window is not None:
        if not model.relative_positions:
            raise ValueError(
                f"window: {options.init} knows absolute positions, so nothing may outgrow its "
                f"context of {most} frames: leave it out"
            )
        if options.window != most:
            raise ValueError(
                f"window must be {most}, the frames that {options.init} holds and its streams see, "
                f"got {options.window}"
            )
    views = views_of(options, model.config.grid_height, model.config.grid_width)
    purpose = {"init": options.init, **options.purpose()}
    run = TrainingRun(options, clips, model, {"finetune": purpose})
    run.resume()
    if run.accelerator.is_main_process:
        copy_parts(model_path(options.init), options.out)
        write_json(options.out / RECORD_FILE, {**purpose, "options": asdict(options)})
    wrong = corruption_of(options, clips.codebook_size, run.accelerator.process_index)
    loss = MixtureLoss(options, views, run.accelerator.device, wrong)
    run.train(loss)
    seen = {} if held_out is None else loss.validate(run, held_out)
    console = make_console(run.accelerator.is_main_process)
    console.print(next_steps(options.out, options.tokens))
    return {"steps": run.step, **seen}
