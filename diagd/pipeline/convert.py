"""Turn a released checkpoint into our folder format: config.json and model.safetensors.

diagd convert Cosmos-Predict1-4B/model.pt cosmos-4b
diagd convert WHAM_200M.ckpt wham-200m
diagd convert Emu3.5-Image emu3.5
diagd convert diagd/assets/doom doom-any --adapter lora

Weights keep their type and are copied one tensor at a time, so 24 GB do not need 24 GB of memory.
Tokenizer and actions are copied if the checkpoint has them.
"""

from dataclasses import asdict
from typing import Any

from diagd.console import make_console
from diagd.families.checkpoints import CONFIG_FILE, WEIGHTS_FILE, empty_model, find_model
from diagd.pipeline.options import ConvertOptions
from diagd.pipeline.world_folder import save_checkpoint
from diagd.system import only_writer


def main(options: ConvertOptions) -> dict[str, Any]:
    """Detect a checkpoint's format, write it in ours, and report what it was."""
    if (options.target / WEIGHTS_FILE).exists() and not options.force:
        raise ValueError(f"{options.target} holds a checkpoint already: give --force to replace it")
    found = find_model(options.source, options.config, options.adapter)
    model = empty_model(found)
    with only_writer(options.target):
        parts = save_checkpoint(found, options.target, options.tokenizer)
    parameters = sum(weight.numel() for weight in model.parameters())
    console = make_console()
    console.print(f"{found.path}: {found.family.name}, {parameters / 1e6:.1f}M parameters")
    if found.family.licence:
        console.print(f"licence: {found.family.licence}")
    console.print(f"wrote {options.target}: {', '.join([CONFIG_FILE, WEIGHTS_FILE, *parts])}")
    return {
        "family": found.family.name,
        "parameters": parameters,
        "config": asdict(found.config),
        "parts": parts,
    }
