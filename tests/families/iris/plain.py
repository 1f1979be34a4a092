"""IRIS written down plainly from its published facts: no cache, their names.

Facts, from eloialonso/iris (GPL-3.0) and arXiv:2209.00588:

- the state dict of an agent: `tokenizer.`, `world_model.` and `actor_critic.`;
- the sequence is frames of K x K codes with one action behind each but the last; codes and actions
  have a table each, and every place of the sequence has a learned vector;
- a pre-norm GPT: LayerNorms, biases everywhere, exact GELU in the MLP, which is four times as wide;
- codes are read, through a layer with ReLU, from all places but the last code of each frame: an
  action tells the first code of the next one;
- it holds so many frames with their actions. When the next action and frame do not fit, all is
  forgotten but the last frame;
- the tokenizer is a VQ-GAN of taming-transformers that attends at some resolutions; the closest
  code is taken; levels are rounded down.
"""

import re

import torch
from torch import Tensor
from torch.nn import functional

from tests.families.llamagen.plain import PlainTokenizer, Tensors, random_tokenizer

RENAMED = (
    (r"\.res\.", ".block."),
    (r"\.mid\.0\.", ".mid.block_1."),
    (r"\.mid\.1\.", ".mid.attn_1."),
    (r"\.mid\.2\.", ".mid.block_2."),
    (r"^encoder\.conv_blocks\.", "encoder.down."),
    (r"^quant_conv\.", "pre_quant_conv."),
    (r"^quantize\.embedding\.", "embedding."),
)


def random_agent(
    hidden_size: int, num_layers: int, num_codes: int, num_actions: int, side: int, num_frames: int
) -> Tensors:
    """Draw weights so wide that every visible token matters, under the names of the release."""
    generator = torch.Generator().manual_seed(0)
    weights: Tensors = {}

    def draw(name: str, *shape: int, scale: float = 0.2) -> None:
        weights[f"world_model.{name}"] = torch.randn(shape, generator=generator) * scale

    def linear(name: str, size_in: int, size_out: int) -> None:
        draw(f"{name}.weight", size_out, size_in)
        draw(f"{name}.bias", size_out)

    def norm(name: str) -> None:
        draw(f"{name}.weight", hidden_size)
        weights[f"world_model.{name}.weight"] += 1
        draw(f"{name}.bias", hidden_size)

    size, length = hidden_size, num_frames * (side**2 + 1)
    draw("pos_emb.weight", length, size)
    draw("embedder.embedding_tables.0.weight", num_actions, size, scale=1)
    draw("embedder.embedding_tables.1.weight", num_codes, size, scale=1)
    norm("transformer.ln_f")
    for i in range(num_layers):
        block = f"transformer.blocks.{i}"
        for part in ("key", "query", "value", "proj"):
            linear(f"{block}.attn.{part}", size, size)
        norm(f"{block}.ln1")
        norm(f"{block}.ln2")
        linear(f"{block}.mlp.0", size, 4 * size)
        linear(f"{block}.mlp.2", 4 * size, size)
        weights[f"world_model.{block}.attn.mask"] = torch.ones(length, length).tril()
    for head, outputs, places in (
        ("observations", num_codes, side**2),
        ("rewards", 3, 1),
        ("ends", 2, 1),
    ):
        linear(f"head_{head}.head_module.0", size, size)
        linear(f"head_{head}.head_module.2", size, outputs)
        indices = torch.zeros(places * num_frames, dtype=torch.int64)
        weights[f"world_model.head_{head}.indices"] = indices
    weights["actor_critic.conv1.weight"] = torch.zeros(32, 3, 3, 3)
    return weights


def agent_tokenizer(tokenizer: Tensors) -> Tensors:
    """Give a tokenizer of LlamaGen's names those of IRIS, whose decoder counts from the end."""
    last = max(int(name.split(".")[2]) for name in tokenizer if "conv_blocks" in name)
    renamed: Tensors = {"tokenizer.lpips.lin0.model.1.weight": torch.zeros(1)}
    for name, tensor in tokenizer.items():
        if name == "quantize.codebook_used":
            continue
        name = re.sub(
            r"^decoder\.conv_blocks\.(\d+)", lambda at: f"decoder.up.{last - int(at[1])}", name
        )
        for pattern, theirs in RENAMED:
            name = re.sub(pattern, theirs, name)
        renamed[f"tokenizer.{name}"] = tensor
    return renamed


def random_agent_tokenizer(num_codes: int) -> Tensors:
    """Draw a tokenizer of patches of 8 px that attends at the two middle resolutions."""
    channels = (32, 32, 32, 32)
    return random_tokenizer(channels, 16, num_codes, code_size=8, attend=(1, 2))


class PlainAgentTokenizer(PlainTokenizer):
    """The same with functions alone."""

    @property
    def codes(self) -> Tensor:
        return self.weights["quantize.embedding.weight"]

    def direction(self, latents: Tensor) -> Tensor:
        return latents


@torch.no_grad()
def plain_logits(
    weights: Tensors, num_heads: int, lanes: list[tuple[int, int, bool]], seen: Tensor
) -> Tensor:
    """Return (N, V) logits of lanes (position, id, whether it is an action).

    Args:
        seen: (N, N) bool, which lanes each lane attends to.
    """
    own = {n.removeprefix("world_model."): w for n, w in weights.items() if "world_model." in n}

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ own[f"{name}.weight"].T + own[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return x * own[f"{name}.weight"] + own[f"{name}.bias"]

    x = torch.stack(
        [
            own[f"embedder.embedding_tables.{int(not is_action)}.weight"][id]
            + own["pos_emb.weight"][position]
            for position, id, is_action in lanes
        ]
    )
    num_layers = sum(name.endswith("ln1.weight") for name in own)
    for i in range(num_layers):
        block = f"transformer.blocks.{i}"
        normed, heads = norm(f"{block}.ln1", x), []
        parts = [linear(f"{block}.attn.{n}", normed) for n in ("query", "key", "value")]
        for q, k, v in zip(*(part.chunk(num_heads, -1) for part in parts), strict=True):
            scores = (q @ k.T / q.shape[-1] ** 0.5).masked_fill(~seen, float("-inf"))
            heads.append(scores.softmax(-1) @ v)
        x = x + linear(f"{block}.attn.proj", torch.cat(heads, -1))
        inner = linear(f"{block}.mlp.0", norm(f"{block}.ln2", x))
        x = x + linear(f"{block}.mlp.2", functional.gelu(inner))
    x = linear("head_observations.head_module.0", norm("transformer.ln_f", x)).relu()
    return linear("head_observations.head_module.2", x)


def greedy_frames(weights: Tensors, num_heads: int, frame: Tensor, actions: list[int]) -> Tensor:
    """Generate a frame (K, K) after each action, code by code; forget as their loop does."""
    held, size = len(weights["world_model.pos_emb.weight"]), frame.numel()
    given = sequence = [(int(code), False) for code in frame.flatten()]
    frames = []
    for action in actions:
        if len(sequence) + 1 + size > held:
            sequence = given
        sequence = [*sequence, (action, True)]
        for _ in range(size):
            lanes = [(place, *one) for place, one in enumerate(sequence)]
            seen = torch.ones(len(lanes), len(lanes), dtype=torch.bool).tril()
            code = int(plain_logits(weights, num_heads, lanes, seen)[-1].argmax())
            sequence = [*sequence, (code, False)]
        given = sequence[-size:]
        frames.append(torch.tensor([code for code, _ in given]).view_as(frame))
    return torch.stack(frames)
