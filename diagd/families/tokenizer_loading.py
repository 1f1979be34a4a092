"""Recognise what a tokenizer folder holds, and load it."""

from pathlib import Path

from diagd.families.cosmos.tokenizer import DECODER_NAME, ENCODER_NAME, CosmosTokenizer
from diagd.families.wham.tokenizer import WHAM_KIND, WHAMTokenizer
from diagd.tokenizers.storage import CONFIG_NAME, read_config
from diagd.tokenizers.vq import VideoTokenizer, VQTokenizer


def load_tokenizer(folder: str | Path, allow_torchscript: bool = False) -> VideoTokenizer:
    """Load the tokenizer of a folder, on the CPU.

    A folder with `encoder.jit` and `decoder.jit` is Cosmos', as NVIDIA gives it out. In any other
    one config.json says what it is: `"kind": "wham-vit-vqgan"`, or `"_class_name": "VQModel"` of
    diffusers.

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
    encoder_path, decoder_path = folder / ENCODER_NAME, folder / DECODER_NAME
    if encoder_path.is_file() or decoder_path.is_file():
        if not allow_torchscript:
            raise ValueError(
                f"{folder} holds TorchScript, which runs code when it is loaded: "
                "name this folder as the tokenizer if you trust it"
            )
        return CosmosTokenizer.from_jit(encoder_path, decoder_path)
    config = read_config(folder / CONFIG_NAME)
    if config.get("kind") == WHAM_KIND:
        return WHAMTokenizer.from_pretrained(folder)
    if config.get("_class_name") == "VQModel":
        return VQTokenizer.from_pretrained(folder)
    raise ValueError(
        f"{folder / CONFIG_NAME}: expected kind {WHAM_KIND} or _class_name VQModel, "
        f"got {config.get('kind', config.get('_class_name'))!r}"
    )
