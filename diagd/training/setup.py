"""The initial model of a run, fitted to its clips, and the optimizers that train it."""

import dataclasses
import math

import torch

from diagd.backends.devices import multiplies_bfloat16
from diagd.data.vectors import VectorActions, load_actions
from diagd.families import checkpoints
from diagd.families.presets import PRESETS
from diagd.models.config import ModelConfig
from diagd.models.rotary import rotary_frequencies_3d
from diagd.models.transformer import Transformer
from diagd.tokenizers.shards import TokenClips, codebook_fingerprint
from diagd.tokenizers.vq import VQTokenizer
from diagd.training.options import RunOptions


def check_fit(model: str, config: ModelConfig, clips: TokenClips) -> None:
    """Raise ValueError unless a model, by its name or folder, matches the clips' tokens."""
    actions = None
    if config.num_action_tokens:
        actions = load_actions(checkpoints.base_path(model) / checkpoints.ACTIONS_FILE)
    own = actions if isinstance(actions, VectorActions) else actions.names if actions else ()
    for what, of_model, of_clips in (
        ("grid", (config.grid_height, config.grid_width), tuple(clips.tokens.shape[2:])),
        ("number of visual ids", config.image_vocab_size, clips.codebook_size),
        ("number of action tokens per frame", config.num_action_tokens, clips.codec.num_tokens),
        ("actions", own, clips.vectors or clips.action_names),
    ):
        if of_model != of_clips:
            raise ValueError(
                f"clips do not match {model}: {what} is {of_clips}, the model's {of_model}"
            )
    check_tokenizer(model, clips)


def check_tokenizer(model: str, clips: TokenClips) -> None:
    """Raise ValueError if the clips are tokens of another tokenizer than the model's own."""
    folder = checkpoints.base_path(model) / checkpoints.TOKENIZER_FOLDER
    tokenizer = checkpoints.load_tokenizer(folder) if folder.is_dir() and clips.codebook else None
    if isinstance(tokenizer, VQTokenizer) and codebook_fingerprint(tokenizer) != clips.codebook:
        raise ValueError(f"clips do not match {model}: they were tokenized with another tokenizer")


def fit_config(
    preset: str, clips: TokenClips, frames: int, sliding_frames: int | None = None
) -> ModelConfig:
    """Fit a preset to the data: its grid, its vocabulary, and a context of `frames` frames."""
    grid_height, grid_width = clips.tokens.shape[2:]
    config = dataclasses.replace(
        PRESETS[preset],
        vocab_size=clips.codebook_size + clips.codec.num_ids,
        image_vocab_size=clips.codebook_size,
        grid_height=grid_height,
        grid_width=grid_width,
        num_action_tokens=clips.codec.num_tokens,
        max_positions=frames * clips.slots_per_frame - clips.codec.num_tokens,
    )
    return slide(config, sliding_frames)


def size_of(init: str, clips: TokenClips, options: RunOptions) -> str | None:
    """Return the preset that a checkpoint has the shape of, fitted to the data; None if none."""
    shape = checkpoints.find_model(init).config
    for name, preset in PRESETS.items():
        if preset.prefix_length:
            continue
        fitted = fit_config(name, clips, options.frames_held, options.sliding_frames)
        if dataclasses.replace(fitted, max_positions=shape.max_positions) == shape:
            return name
    return None


def slide(config: ModelConfig, frames: int | None) -> ModelConfig:
    """Limit layers but the first to the positions of `frames` frames; None: no change."""
    if frames is None:
        return config
    window = frames * (config.tokens_per_frame + config.num_action_tokens)
    layers = tuple(range(1, config.num_layers))
    return dataclasses.replace(config, sliding_window=window, sliding_layers=layers)


def start_model(config: ModelConfig, seed: int, init: str | None = None) -> Transformer:
    """Make a model with random weights, with aimed heads if its positions allow them.

    Or load the weights of the checkpoint folder `init`, whose context length may differ.
    """
    model = Transformer.random(config, seed=seed)
    if init is None:
        return aim_heads(model) if config.bias and config.position == "rope3d" else model
    source = checkpoints.load_model(init)
    if dataclasses.replace(source.config, max_positions=config.max_positions) != config:
        raise ValueError(f"init: {init} has another shape or vocabulary")
    model.load_state_dict(source.state_dict())
    return model


# (frames, rows, columns) from a lane to the token it attends to, by layer and head. The lane at
# column j predicts column j + 1, so (-1, 0, 1) is the place that it writes, one frame back.
OFFSETS = (
    ((-1, 0, 1), (-1, 0, -1), (-1, 0, 3), (0, -1, 1), (0, 0, -1)),
    ((-1, 0, 1), (-1, 1, 1), (-1, -1, 1), (0, -1, 0), (0, -1, 2)),
    ((-1, 0, 1), (-1, 0, 0), (-1, 0, 2), (-2, 0, 1), (0, -1, 1)),
    ((-1, 0, -2), (-1, 0, 4)),
)
SHARPNESS = 6.0  # squared length of a bias in every rotary plane


@torch.no_grad()
def aim_heads(model: Transformer) -> Transformer:
    """Set the query and key biases of the first heads so that each attends to its OFFSETS entry.

    Biases alone make a rotary head attend to a fixed offset in (frame, row, column), whatever the
    tokens are. A randomly initialized model spends its first millions of tokens on finding such
    heads (dev/LOG.md); training then adapts them to the motion.
    """
    config = model.config
    if config.position != "rope3d" or not config.bias or config.num_kv_heads != config.num_heads:
        raise ValueError(
            "aim_heads needs position='rope3d', bias=True and num_kv_heads=num_heads, got "
            f"{config.position!r}, {config.bias} and {config.num_kv_heads} of {config.num_heads}"
        )
    time, space = rotary_frequencies_3d(config)
    length = math.sqrt(SHARPNESS)
    for layer, offsets in zip(model.model.blocks, OFFSETS, strict=False):
        queries = layer.self_attn.q_proj.bias.view(config.num_heads, 2, -1)
        keys = layer.self_attn.k_proj.bias.view(config.num_heads, 2, -1)
        for head, (frame, row, column) in enumerate(offsets[: config.num_heads]):
            angles = torch.cat([frame * time, row * space, column * space])
            keys[head, 0], keys[head, 1] = length, 0.0
            queries[head, 0], queries[head, 1] = length * angles.cos(), length * angles.sin()
    return model


def choose_precision(asked: str) -> str:
    """Return "bf16" or "no"; "auto" is bf16 if the training device multiplies it."""
    if asked != "auto":
        return asked
    return "bf16" if _trains_in_bfloat16() else "no"


def _trains_in_bfloat16() -> bool:
    return multiplies_bfloat16(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


class FloatMuon(torch.optim.Muon):
    """Muon with float32 products, for devices that do not multiply bfloat16.

    There torch's own takes twenty times as long, more than the gradients (dev/LOG.md).
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if not (state := self.state[weight]):
                    state["momentum_buffer"] = torch.zeros_like(weight)
                average = state["momentum_buffer"].lerp_(weight.grad, 1 - group["momentum"])
                update = weight.grad.lerp(average, group["momentum"])
                wide = update if len(update) <= update.shape[1] else update.T
                wide = wide / wide.norm().clamp(min=group["eps"])
                a, b, c = group["ns_coefficients"]
                for _ in range(group["ns_steps"]):  # all singular values converge to 1
                    gram = wide @ wide.T
                    wide = a * wide + (b * gram + c * gram @ gram) @ wide
                update = wide if len(update) <= update.shape[1] else wide.T
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(update, alpha=0.2 * max(weight.shape) ** 0.5 * group["lr"])


def make_optimizers(model: Transformer, options: RunOptions) -> list[torch.optim.Optimizer]:
    """Make AdamW for all weights, or Muon for the matrices of blocks and AdamW for the rest."""
    rate, decay = options.learning_rate, options.weight_decay
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim > 1]
    vectors = [p for p in trained if p.ndim <= 1]
    optimizers: list[torch.optim.Optimizer] = []
    if options.optimizer == "muon" and matrices:
        in_blocks = {id(p) for p in model.model.layers.parameters()}
        blocks = [p for p in matrices if id(p) in in_blocks]
        matrices = [p for p in matrices if id(p) not in in_blocks]
        muon = torch.optim.Muon if _trains_in_bfloat16() else FloatMuon
        scale = "match_rms_adamw"  # so that AdamW's learning rate fits both
        optimizers.append(muon(blocks, rate, decay, adjust_lr_fn=scale))
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    if groups := [group for group in groups if group["params"]]:
        optimizers.append(torch.optim.AdamW(groups, rate, (0.9, 0.95), weight_decay=decay))
    return optimizers
