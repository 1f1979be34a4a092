"""Recognise what a tokenizer folder holds, and load it."""

from pathlib import Path

from diagd.families import table
from diagd.tokenizers.storage import CONFIG_NAME, read_config
from diagd.tokenizers.vq import VideoTokenizer, VQTokenizer


def load_tokenizer(folder: str | Path, allow_torchscript: bool = False) -> VideoTokenizer:
    """Load the tokenizer of a folder, on the CPU.

    A folder with the TorchScript files of a family (`encoder.jit` and `decoder.jit` of Cosmos) is
    that family's. In any other one config.json says what it is: a `kind` that a family knows, or
    `"_class_name": "VQModel"` of diffusers.

    Args:
        allow_torchscript: whether TorchScript may be loaded, which runs the code in it. Pass True
            only when the user has named this very folder.

    Raises:
        FileNotFoundError: no such folder, or a file of it is missing.
        ValueError: an unknown kind, a damaged file, or TorchScript that nobody allowed.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"tokenizer folder not found: {folder}")
    formats = [family.tokenizer_folder for family in table.FAMILIES if family.tokenizer_folder]
    for form in formats:
        if any((folder / name).is_file() for name in form.torchscript):
            if not allow_torchscript:
                raise ValueError(
                    f"{folder} holds TorchScript, which runs code when it is loaded: "
                    "name this folder as the tokenizer if you trust it"
                )
            return form.load(folder)
    config = read_config(folder / CONFIG_NAME)
    kind, name = config.get("kind"), config.get("_class_name")
    for form in formats:
        if form.kind is not None and form.kind == kind:
            return form.load(folder)
    if name == "VQModel":
        return VQTokenizer.from_pretrained(folder)
    kinds = ", ".join(form.kind for form in formats if form.kind)
    raise ValueError(
        f"{folder / CONFIG_NAME}: expected kind {kinds} or _class_name VQModel, "
        f"got {config.get('kind', name)!r}"
    )
