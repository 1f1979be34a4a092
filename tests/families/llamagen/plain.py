"""LlamaGen written down plainly from its published facts: no cache, no batch tricks, their names.

Facts, from FoundationVision/LlamaGen (MIT):

- a pre-norm LLaMA (RMSNorm, SwiGLU, no biases), queries, keys and values in one matrix `wqkv`;
- the sequence is one class token, embedded by a table of its own whose last row means no class, and
  then the codes of the image; the output layer knows only codes;
- rotary positions: the first half of the planes turns by the row, the second half by the column; a
  plane is a pair of neighbours (2i, 2i + 1); of the class token queries and keys become zero;
- guidance: logits = null + scale * (class - null), where the sequence after no class is fed too;
- of a text: instead of the class token there are 120 vectors, states of a T5 encoder behind two
  matrices with a tanh GELU between; padding, zeros in front of the text, is seen by itself only;
  for guidance 120 learnt states stand there, and the padding of the text hides as many of them.
"""

import torch
from torch import Tensor
from torch.nn import functional

Tensors = dict[str, Tensor]
THETA, EPS = 10000.0, 1e-5


def random_checkpoint(
    hidden_size: int, num_layers: int, num_codes: int, num_classes: int = 1000, seed: int = 0
) -> Tensors:
    """Draw weights so wide that every visible token matters."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    width = -(-hidden_size * 8 // 3 // 256) * 256
    weights = {
        "cls_embedding.embedding_table.weight": draw(num_classes + 1, hidden_size) * 5,
        "tok_embeddings.weight": draw(num_codes, hidden_size) * 5,
        "norm.weight": 1 + draw(hidden_size),
        "output.weight": draw(num_codes, hidden_size),
    }
    for i in range(num_layers):
        weights |= {
            f"layers.{i}.attention.wqkv.weight": draw(3 * hidden_size, hidden_size),
            f"layers.{i}.attention.wo.weight": draw(hidden_size, hidden_size),
            f"layers.{i}.feed_forward.w1.weight": draw(width, hidden_size),
            f"layers.{i}.feed_forward.w3.weight": draw(width, hidden_size),
            f"layers.{i}.feed_forward.w2.weight": draw(hidden_size, width),
            f"layers.{i}.attention_norm.weight": 1 + draw(hidden_size),
            f"layers.{i}.ffn_norm.weight": 1 + draw(hidden_size),
        }
    return weights


def random_text_checkpoint(
    hidden_size: int, num_layers: int, num_codes: int, num_places: int, size: int
) -> Tensors:
    """Draw the same of a model that reads a text, `size` numbers a state."""
    weights = random_checkpoint(hidden_size, num_layers, num_codes)
    weights.pop("cls_embedding.embedding_table.weight")
    generator = torch.Generator().manual_seed(1)
    for name, shape in (
        ("uncond_embedding", (num_places, size)),
        ("cap_proj.fc1.weight", (hidden_size, size)),
        ("cap_proj.fc2.weight", (hidden_size, hidden_size)),
    ):
        weights[f"cls_embedding.{name}"] = torch.randn(shape, generator=generator) * 0.4
    return weights


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def turned(states: Tensor, positions: list[int], width: int, first: int) -> Tensor:
    """Rotate (N, D) states of one head; those before the `first` code become zero."""
    half = states.shape[-1] // 2  # numbers of an axis
    speeds = [THETA ** (-i / half) for i in range(0, half, 2)]
    places = [divmod(position - first, width) for position in positions]
    angles = torch.tensor([[at * speed for at in place for speed in speeds] for place in places])
    turns = torch.polar(
        (torch.tensor(positions) >= first).float()[:, None].expand_as(angles), angles
    )
    pairs = torch.view_as_complex(states.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(1)


@torch.no_grad()
def plain_logits(
    weights: Tensors,
    num_heads: int,
    width: int,
    label: int | Tensor,
    lanes: list[tuple[int, int]],
    seen: Tensor,
) -> Tensor:
    """Return (N, V) logits of lanes (position, code), the first of which stand before the image.

    Args:
        width: of the image, in codes.
        label: the class, or the vectors (P, hidden_size) of a text; the codes there are ignored.
        seen: (N, N) bool, which lanes each lane attends to.
    """
    positions = [position for position, _ in lanes]
    codes = torch.tensor([code for _, code in lanes])
    x = weights["tok_embeddings.weight"][codes]
    if isinstance(label, int):
        label = weights["cls_embedding.embedding_table.weight"][label : label + 1]
    x[: (first := len(label))] = label
    num_layers = sum(name.endswith("wqkv.weight") for name in weights)
    for i in range(num_layers):
        own = {
            name.removeprefix(f"layers.{i}."): value
            for name, value in weights.items()
            if name.startswith(f"layers.{i}.")
        }
        normed = rms_norm(x, own["attention_norm.weight"])
        queries, keys, values = (normed @ own["attention.wqkv.weight"].T).chunk(3, dim=-1)
        heads = []
        for q, k, v in zip(*(y.chunk(num_heads, -1) for y in (queries, keys, values)), strict=True):
            q, k = (turned(y, positions, width, first) for y in (q, k))
            scores = (q @ k.T / q.shape[-1] ** 0.5).masked_fill(~seen, float("-inf"))
            heads.append(scores.softmax(-1) @ v)
        x = x + torch.cat(heads, -1) @ own["attention.wo.weight"].T
        normed = rms_norm(x, own["ffn_norm.weight"])
        gate, up = (normed @ own[f"feed_forward.{w}.weight"].T for w in ("w1", "w3"))
        x = x + (functional.silu(gate) * up) @ own["feed_forward.w2.weight"].T
    return rms_norm(x, weights["norm.weight"]) @ weights["output.weight"].T


def guided_logits(
    weights: Tensors,
    num_heads: int,
    width: int,
    label: int,
    lanes: list[tuple[int, int]],
    seen: Tensor,
    scale: float,
) -> Tensor:
    """Return the logits of two passes, one after the class and one after none, combined."""
    num_classes = len(weights["cls_embedding.embedding_table.weight"]) - 1
    said = plain_logits(weights, num_heads, width, label, lanes, seen)
    null = plain_logits(weights, num_heads, width, num_classes, lanes, seen)
    return null + scale * (said - null)


def text_logits(
    weights: Tensors,
    num_heads: int,
    width: int,
    states: Tensor,
    is_text: Tensor,
    lanes: list[tuple[int, int]],
    seen: Tensor,
) -> Tensor:
    """Return logits of lanes (position, code) behind padded states (P, size), one a place.

    Args:
        is_text: (P,) bool, what is no padding.
        lanes: those of the image.
        seen: (P + lanes, P + lanes) bool, if nothing were padding.
    """
    places = len(states)
    hidden = states @ weights["cls_embedding.cap_proj.fc1.weight"].T
    vectors = (
        functional.gelu(hidden, approximate="tanh") @ weights["cls_embedding.cap_proj.fc2.weight"].T
    )
    hidden_places = functional.pad(~is_text, (0, len(lanes)))
    seen = seen & ~hidden_places | torch.eye(len(seen), dtype=torch.bool)
    lanes = [(place, 0) for place in range(places)] + lanes
    return plain_logits(weights, num_heads, width, vectors, lanes, seen)


def greedy_image(
    weights: Tensors, num_heads: int, height: int, width: int, label: int, scale: float = 1.0
) -> Tensor:
    """Generate (height, width) codes one by one, with the whole sequence run again for each."""
    codes: list[int] = []
    for _ in range(height * width):
        lanes = list(enumerate([0, *codes]))
        seen = torch.ones(len(lanes), len(lanes), dtype=torch.bool).tril()
        logits = guided_logits(weights, num_heads, width, label, lanes, seen, scale)
        codes.append(int(logits[-1].argmax()))
    return torch.tensor(codes).view(height, width)


# The tokenizer: a VQ-GAN. Blocks of two residual layers (three in the decoder); those at the lowest
# resolution attend after each layer. Codes are looked up by direction.


def random_tokenizer(
    channels: tuple[int, ...],
    latent_channels: int,
    num_codes: int,
    code_size: int,
    seed: int = 0,
    attend: tuple[int, ...] | None = None,
) -> Tensors:
    """Draw weights under the names of the released files.

    `attend` has the levels that attend, the largest picture being 0; by default the last one.
    """
    generator = torch.Generator().manual_seed(seed)
    weights: Tensors = {}

    def conv(name: str, channels_in: int, channels_out: int, size: int) -> None:
        shape = channels_out, channels_in, size, size
        weights[f"{name}.weight"] = torch.randn(shape, generator=generator) / (
            channels_in**0.5 * size
        )
        weights[f"{name}.bias"] = torch.randn(channels_out, generator=generator) * 0.1

    def norm(name: str, count: int) -> None:
        weights[f"{name}.weight"] = 1 + torch.randn(count, generator=generator) * 0.1
        weights[f"{name}.bias"] = torch.randn(count, generator=generator) * 0.1

    def residual(name: str, channels_in: int, channels_out: int) -> None:
        norm(f"{name}.norm1", channels_in)
        conv(f"{name}.conv1", channels_in, channels_out, 3)
        norm(f"{name}.norm2", channels_out)
        conv(f"{name}.conv2", channels_out, channels_out, 3)
        if channels_in != channels_out:
            conv(f"{name}.nin_shortcut", channels_in, channels_out, 1)

    def attention(name: str, count: int) -> None:
        norm(f"{name}.norm", count)
        for part in ("q", "k", "v", "proj_out"):
            conv(f"{name}.{part}", count, count, 1)

    last = len(channels) - 1
    for side, levels, layers in (
        ("encoder", range(last + 1), 2),
        ("decoder", reversed(range(last + 1)), 3),
    ):
        width = channels[0] if side == "encoder" else channels[-1]
        conv(f"{side}.conv_in", 3 if side == "encoder" else latent_channels, width, 3)
        for number, level in enumerate(levels):
            block = f"{side}.conv_blocks.{number}"
            for layer in range(layers):
                residual(f"{block}.res.{layer}", width, channels[level])
                width = channels[level]
                if level in (attend or (last,)):
                    attention(f"{block}.attn.{layer}", width)
            if side == "encoder" and level != last:
                conv(f"{block}.downsample.conv", width, width, 3)
            if side == "decoder" and level:
                conv(f"{block}.upsample.conv", width, width, 3)
        residual(f"{side}.mid.0", channels[-1], channels[-1])
        attention(f"{side}.mid.1", channels[-1])
        residual(f"{side}.mid.2", channels[-1], channels[-1])
        norm(f"{side}.norm_out", width)
        conv(f"{side}.conv_out", width, latent_channels if side == "encoder" else 3, 3)
    conv("quant_conv", latent_channels, code_size, 1)
    conv("post_quant_conv", code_size, latent_channels, 1)
    weights["quantize.embedding.weight"] = torch.randn(num_codes, code_size, generator=generator)
    weights["quantize.codebook_used"] = torch.zeros(65536)
    return weights


class PlainTokenizer:
    """Encode and decode with functions alone."""

    def __init__(self, weights: Tensors) -> None:
        self.weights = weights
        names = [name.split(".")[2] for name in weights if name.startswith("encoder.conv_blocks.")]
        self.num_blocks = len(set(names))

    def conv(self, name: str, x: Tensor, **how: int) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return functional.conv2d(x, weight, bias, **({"padding": weight.shape[-1] // 2} | how))

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return functional.group_norm(x, 32, weight, bias, eps=1e-6)

    def residual(self, name: str, x: Tensor) -> Tensor:
        h = self.conv(f"{name}.conv1", functional.silu(self.norm(f"{name}.norm1", x)))
        h = self.conv(f"{name}.conv2", functional.silu(self.norm(f"{name}.norm2", h)))
        has_shortcut = f"{name}.nin_shortcut.weight" in self.weights
        return h + (self.conv(f"{name}.nin_shortcut", x) if has_shortcut else x)

    def attention(self, name: str, x: Tensor) -> Tensor:
        normed = self.norm(f"{name}.norm", x)
        q, k, v = (self.conv(f"{name}.{part}", normed).flatten(2) for part in "qkv")  # (B, C, P)
        shares = (q.transpose(1, 2) @ k / q.shape[1] ** 0.5).softmax(-1)
        seen = (v @ shares.transpose(1, 2)).view_as(x)
        return x + self.conv(f"{name}.proj_out", seen)

    def middle(self, side: str, x: Tensor) -> Tensor:
        x = self.attention(f"{side}.mid.1", self.residual(f"{side}.mid.0", x))
        return self.residual(f"{side}.mid.2", x)

    def layers(self, block: str, count: int, x: Tensor) -> Tensor:
        for layer in range(count):
            x = self.residual(f"{block}.res.{layer}", x)
            if f"{block}.attn.{layer}.q.weight" in self.weights:
                x = self.attention(f"{block}.attn.{layer}", x)
        return x

    def end(self, side: str, x: Tensor) -> Tensor:
        return self.conv(f"{side}.conv_out", functional.silu(self.norm(f"{side}.norm_out", x)))

    def direction(self, latents: Tensor) -> Tensor:
        return latents / latents.norm(dim=-1, keepdim=True)

    @property
    def codes(self) -> Tensor:
        vectors = self.weights["quantize.embedding.weight"]
        return vectors / vectors.norm(dim=-1, keepdim=True)

    def encode(self, pixels: Tensor) -> Tensor:
        """(B, 3, H_px, W_px) in [-1, 1] -> (B, h, w) ids of the codes of the nearest direction."""
        x = self.conv("encoder.conv_in", pixels)
        for i in range(self.num_blocks):
            x = self.layers(f"encoder.conv_blocks.{i}", 2, x)
            if i < self.num_blocks - 1:
                x = functional.pad(x, (0, 1, 0, 1))
                x = self.conv(f"encoder.conv_blocks.{i}.downsample.conv", x, stride=2, padding=0)
        x = self.conv("quant_conv", self.end("encoder", self.middle("encoder", x)))
        x = self.direction(x.movedim(1, -1))
        return (x[..., None, :] - self.codes).norm(dim=-1).argmin(-1)

    def decode(self, ids: Tensor) -> Tensor:
        """(B, h, w) ids -> (B, 3, H_px, W_px) about [-1, 1]."""
        x = self.conv("post_quant_conv", self.codes[ids].movedim(-1, 1))
        x = self.middle("decoder", self.conv("decoder.conv_in", x))
        for i in range(self.num_blocks):
            x = self.layers(f"decoder.conv_blocks.{i}", 3, x)
            if i < self.num_blocks - 1:
                x = x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
                x = self.conv(f"decoder.conv_blocks.{i}.upsample.conv", x)
        return self.end("decoder", x)
