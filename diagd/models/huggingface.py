"""Causal language models of transformers behind the protocol, with a cache written by slot.

The stock caches append, or write at a running index, so tokens could be fed in one order only.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, LlamaConfig, LlamaForCausalLM, PreTrainedModel, StaticLayer

from diagd.decoding.model import CausalModel, ModelShape
from diagd.decoding.schedule import Section
from diagd.decoding.visibility import Seen
from diagd.models.attention import (
    check_length,
    check_sizes,
    keep_lanes,
    refuse_context,
    rows_at,
    write_rows,
)
from diagd.models.config import ModelConfig
from diagd.models.rotary import grid_coordinates, shared_coordinates
from diagd.models.transformer import Transformer

_MASKED_ATTENTION = ("eager", "sdpa")  # implementations that support a 4-D mask
_SPATIAL = "mrope_section", "get_rope_index"  # of modules that give images row and column positions
_PROBE_TOKENS = 6
_PROBE_TOLERANCE = 1e-2  # relative to the spread of the logits; half precision: sqrt(eps) if larger


class SlotCacheLayer(StaticLayer):
    """Keys and values of one layer, each (S, heads, num_slots, D), allocated at the first step."""

    slots: Tensor  # (S', L) int64, to write in the next step
    rows: dict[torch.device, Tensor]  # `rows_at`, shared by all layers
    first = 0  # first sequence
    num_visible = 0  # number of slots read

    def __init__(self, num_slots: int, batch_size: int) -> None:
        super().__init__(num_slots)
        self.batch_size = batch_size

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            whole = (
                one[:1].expand(self.batch_size, -1, -1, -1) for one in (key_states, value_states)
            )
            self.lazy_initialization(*whole)
        assert self.keys is not None
        assert self.values is not None
        device = self.keys.device  # layers may be on several devices
        if device not in self.rows:
            self.rows[device] = rows_at(self.keys, self.slots.to(device), self.first)
        write_rows(self.keys, self.rows[device], key_states)
        write_rows(self.values, self.rows[device], value_states)
        own = slice(self.first, self.first + len(key_states))
        return self.keys[own, :, : self.num_visible], self.values[own, :, : self.num_visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_visible, 0  # visible keys, and the offset of the first

    def get_seq_length(self) -> int:
        return self.num_visible


class Vocabulary:
    """How a class embeds ids and computes logits: by its forward, unless in `VOCABULARIES`."""

    first_valid = 0  # the logits of lower ids are the least finite number
    image_range: tuple[int, int] | None = None  # low <= id < high
    image_start: int | None = None  # the id before an image
    num_sizes = 0  # maximum tokens between the image start and the image
    is_spatial = False  # whether a token has three positions (see `shared_coordinates`)

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        self.num_text = len(model.get_input_embeddings().get_parameter("weight"))
        self.num_embeddings = self.num_text

    def logits(self, tokens: Tensor, logits_to_keep: int | Tensor = 0, **inputs: Any) -> Tensor:
        return self.model(input_ids=tokens, logits_to_keep=logits_to_keep, **inputs).logits


class ChameleonVocabulary(Vocabulary):  # its forward masks an image's ids and is bypassed
    num_sizes = 2  # Lumina-mGPT's height and width

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        names = self.model.model.vocabulary_mapping
        if names.image_tokens:
            self.image_range = names.image_tokens[0], names.image_tokens[-1] + 1
        self.image_start = names.vocab_map.get("<racm3:break>")

    def logits(self, tokens: Tensor, logits_to_keep: int | Tensor = 0, **inputs: Any) -> Tensor:
        hidden = self.model.model(input_ids=tokens, **inputs).last_hidden_state
        return self.model.lm_head(keep_lanes(hidden, logits_to_keep))


class JanusVocabulary(Vocabulary):
    """Text ids, then image ids, which have their own embedding, aligner and head."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.first_valid = self.num_text
        self.num_embeddings += self.model.model.generation_embeddings.num_embeddings
        self.image_range = self.num_text, self.num_embeddings
        options = getattr(model.generation_config, "generation_kwargs", None) or {}
        self.image_start = options.get("boi_token_id")

    def logits(self, tokens: Tensor, logits_to_keep: int | Tensor = 0, **inputs: Any) -> Tensor:
        is_image = tokens >= self.num_text
        text = self.model.get_input_embeddings()(tokens.masked_fill(is_image, 0))
        image = (tokens - self.num_text).clamp(min=0)
        image = self.model.prepare_embeddings_for_image_generation(image)
        embedded = torch.where(is_image[..., None], image, text)
        hidden = self.model.model(inputs_embeds=embedded, **inputs).last_hidden_state
        logits = self.model.model.generation_head(keep_lanes(hidden, logits_to_keep))
        # finite in float32 too, as guidance subtracts two of them
        never = max(torch.finfo(dtype).min for dtype in (logits.dtype, torch.float32))
        return functional.pad(logits, (self.num_text, 0), value=never)


class GlmImageVocabulary(Vocabulary):
    """Codes, the image start and end, text ids; positions are given, of which it keeps its own."""

    is_spatial = True

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.image_start = self.model.config.image_start_token_id
        self.image_range = 0, self.model.config.vq_config.num_embeddings


VOCABULARIES = {  # by model_type
    "chameleon": ChameleonVocabulary,
    "glm_image": GlmImageVocabulary,
    "janus": JanusVocabulary,
}


def vocabulary_of(model: PreTrainedModel) -> type[Vocabulary]:
    return VOCABULARIES.get(model.config.model_type, Vocabulary)


class HuggingFaceModel(CausalModel):
    """A transformers causal language model that can be decoded out of order.

    Args:
        model: as loaded by transformers 5, with `attn_implementation` eager or sdpa; it is put in
            evaluation mode, and may be offloaded. ValueError for models without position ids or
            mask, with several positions per token (except GLM-Image), a recurrent state, windowed
            attention, or a forward that masks ids.
    """

    _num_columns = 0  # of the logits; unknown until they are computed

    def __init__(self, model: PreTrainedModel) -> None:
        _check_model(model)
        self.model = model.eval()  # disables dropout
        self.config = model.config.get_text_config(decoder=True)  # of multimodal models the LM's
        self.vocabulary = vocabulary_of(model)(model)
        self._cache_argument = cache_argument(model)
        self._longest = int(self.config.max_position_embeddings)
        rope = getattr(self.config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":  # longer contexts rotate all cached keys anew
            self._longest = rope["original_max_position_embeddings"]
        self._num_columns = _check_order_does_not_matter(self)

    @property
    def shape(self) -> ModelShape:
        # offloaded weights have no device until used, wherever the inputs are
        places = (weight.device for weight in self.model.parameters() if not weight.is_meta)
        device, ids = next(places, torch.device("cpu")), self.vocabulary.num_embeddings
        return ModelShape(self._num_columns, ids, self._longest, device)

    @property
    def image_range(self) -> tuple[int, int] | None:
        """The ids of image tokens, for `valid_range`, if known for the class."""
        return self.vocabulary.image_range

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def check_prompt(self, prompt: Tensor, context_frames: int) -> None:
        start, num_sizes = self.vocabulary.image_start, self.vocabulary.num_sizes
        if self.image_range is None:
            return
        padding = getattr(self.model.generation_config, "pad_token_id", None)
        if padding is not None and len(prompt) > 1 and (prompt == padding).any():
            raise ValueError(
                f"prompt must be without padding, got id {padding}: prompts of unlike lengths are "
                "a list; of a guidance pair give one row, the other half to diagd.GuidedModel"
            )
        ends = prompt[:, -1 - num_sizes :] == start
        if start is not None and not context_frames and not ends.any(1).all():
            raise ValueError(
                f"prompt must end with the image start, id {start}, "
                f"got {prompt[:, -1:].flatten().tolist()}: the text must precede the image"
            )

    def coordinates(
        self, positions: Tensor, sections: Sequence[Section] | None = None
    ) -> Tensor | None:
        return shared_coordinates(positions, sections or ()) if self.vocabulary.is_spatial else None

    def make_cache(self, batch_size: int, num_slots: int, context: Tensor | None = None) -> Cache:
        check_sizes(batch_size, num_slots, context)
        count = self.config.num_hidden_layers
        return Cache(layers=[SlotCacheLayer(num_slots, batch_size) for _ in range(count)])

    def renew_cache(self, cache: Cache, context: Tensor | None = None) -> bool:
        refuse_context(context)
        cache.reset()  # in place
        return True

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        seen: Seen,
        cache: Cache,
        logits_to_keep: int | Tensor = 0,
        first: int = 0,
        coordinates: Tensor | None = None,
    ) -> Tensor:
        slots, visible, rows = slots.expand(tokens.shape), seen.mask(), dict[Any, Tensor]()
        layer: Any
        for layer in cache.layers:  # transformers does not pass it on
            layer.slots, layer.rows, layer.first = slots, rows, first
            layer.num_visible = visible.shape[-1]
        return self.vocabulary.logits(
            tokens,
            logits_to_keep,
            use_cache=True,
            **{self._cache_argument: cache},
            **self._inputs(tokens, positions, visible, coordinates),
        ).to(tokens.device)

    def _inputs(
        self, tokens: Tensor, positions: Tensor, visible: Tensor, coordinates: Tensor | None = None
    ) -> dict[str, Tensor]:
        positions = positions.expand(tokens.shape)
        turned = self.coordinates(positions) if coordinates is None else coordinates
        never = torch.finfo(self.dtype).min
        mask = torch.zeros_like(visible, dtype=self.dtype).masked_fill(~visible, never)
        mask = mask.reshape(-1, 1, *mask.shape[-2:]).expand(len(tokens), -1, -1, -1)
        return {"attention_mask": mask, "position_ids": positions if turned is None else turned}

    def logits(
        self,
        tokens: Tensor,
        context: Tensor | None = None,
        positions: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> Tensor:
        """Run the model without a cache, differentiably: (B, N) int64 -> (B, N, vocab_size).

        Args:
            positions: (N,) int64; None means 0 .. N-1, below max_positions.
            visible: (N, N) bool, True = may attend; None means causal.
        """
        refuse_context(context)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        if positions is None:
            check_length(tokens, self.max_positions)
        if positions is not None or visible is not None:
            mask = places <= places[:, None] if visible is None else visible
            given = self._inputs(tokens, places if positions is None else positions, mask)
        else:
            turned = self.coordinates(places)
            given = {} if turned is None else {"position_ids": turned[:, None]}
        return self.vocabulary.logits(tokens, use_cache=False, **given).to(tokens.device)


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of forward's cache argument, which changed in 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _check_model(model: PreTrainedModel) -> None:
    name = type(model).__name__
    is_ours = isinstance(model, PreTrainedModel) and model.can_generate()
    if not is_ours or model.config.is_encoder_decoder:
        raise ValueError(f"model must be a transformers causal LM, got {name}")
    config = model.config.get_text_config(decoder=True)
    needed = {"attention_mask", "position_ids", "logits_to_keep", cache_argument(model)}
    missing = sorted(needed - set(inspect.signature(model.forward).parameters))
    if getattr(config, "alibi", False):
        missing = missing or ["position_ids (it uses ALiBi)"]
    is_unbounded = not hasattr(config, "max_position_embeddings")
    window = getattr(config, "sliding_window", None) or 0
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    attention = config._attn_implementation
    parts = list(model.modules())
    is_spatial = any(getattr(part, name, None) for part in parts for name in _SPATIAL)
    is_spatial = is_spatial or _SPATIAL[0] in str(getattr(config, "rope_parameters", None))
    is_empty = any(weight.is_meta for weight in model.parameters())
    is_empty = is_empty and not any(hasattr(part, "_hf_hook") for part in parts)  # accelerate's
    for holds, problem in (
        (model._is_stateful, "cannot be fed out of order: it is recurrent"),
        (missing, f"cannot be fed out of order: its forward has no {', '.join(missing)}"),
        (is_unbounded, "cannot be used: its config has no max_position_embeddings"),
        (
            is_spatial and not vocabulary_of(model).is_spatial,
            "cannot be used: its tokens have three positions (M-RoPE), not one",
        ),
        (
            kinds != {"full_attention"} or window > 0,
            "cannot be used: it needs full attention in every layer, "
            f"got {', '.join(sorted(kinds))} with sliding_window={window}",
        ),
        (
            attention not in _MASKED_ATTENTION,
            f"must run {' or '.join(_MASKED_ATTENTION)} attention, which supports a 4-D mask, "
            f"got {attention!r}",
        ),
        (is_empty, "cannot be used: its weights are on the meta device"),
    ):
        if holds:
            raise ValueError(f"{name} {problem}")


@torch.no_grad()
def _check_order_does_not_matter(model: HuggingFaceModel) -> int:
    """Feed a few tokens in reverse order through the cache, and compare with one plain pass.

    Returns the number of columns of the logits, which may be fewer than the embedding's rows.
    """
    name, half = type(model.model).__name__, _PROBE_TOKENS // 2
    ids = torch.linspace(0, model.num_embeddings - 1, _PROBE_TOKENS, device=model.device)
    tokens = ids.long()[None]
    first = model.vocabulary.first_valid
    expected = model.logits(tokens)[..., first:]
    if banned := (expected <= torch.finfo(model.dtype).min).any(1).sum().item():
        raise ValueError(f"{name} cannot be used: its forward masks {banned} ids")
    positions = torch.arange(_PROBE_TOKENS, device=model.device).view(2, half).flip(1)
    cache, logits = model.make_cache(1, _PROBE_TOKENS), torch.empty_like(expected)
    for lanes in positions:
        slots = _PROBE_TOKENS - 1 - lanes
        visible = torch.arange(_PROBE_TOKENS - 1, -1, -1, device=model.device) <= lanes[:, None]
        seen = Seen.of_mask(visible, lanes, slots.new_full(visible.shape[1:], -1))
        fed = model.forward(tokens[:, lanes], lanes, slots, seen, cache)
        logits[:, lanes] = fed[..., first:]
    spread = (expected - expected.mean(1, keepdim=True)).float().norm()
    error = (logits - expected).float().norm()
    if error > max(_PROBE_TOLERANCE, torch.finfo(model.dtype).eps ** 0.5) * spread:
        raise ValueError(
            f"{name} cannot be fed out of order: it ignores the mask, the positions or the slots "
            f"(its logits are {error / spread:.0%} off)"
        )
    return first + expected.shape[-1]


class _GivenRotary(nn.Module):
    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        coordinates = grid_coordinates(self.rotary.config, position_ids)
        cos, sin = self.rotary(position_ids, coordinates, x.dtype)
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)


def llama_config(config: ModelConfig) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        attention_bias=config.bias,
        mlp_bias=config.bias,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_embeddings,
        bos_token_id=None,
        eos_token_id=None,
    )


def llama_of(model: Transformer) -> LlamaForCausalLM:
    """Copy the weights to a LlamaForCausalLM with the same logits, if the model is LLaMA-like."""
    if not (config := model.config).is_llama:
        raise ValueError("baseline hf needs a LLaMA-like model: use --baseline none")
    with torch.device("meta"):
        llama = LlamaForCausalLM(llama_config(config))
    llama.model.rotary_emb = _GivenRotary(model.model.rotary)  # pyright: ignore[reportAttributeAccessIssue]
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])  # tied
    llama.load_state_dict(weights, assign=True)
    llama.tie_weights()
    return llama.eval()
