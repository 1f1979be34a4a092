"""MammothModa2's first stage in miniature, against a plain reading of what its makers do.

A text tokenizer of bytes, their names, and pictures of 3 x 5 out of 24 codes. In Dev the first
table ends before the second one begins.
"""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

import diagd
from diagd.backends.prepare import prepare
from diagd.benchmark.steps import linear_parameters
from diagd.decoding.sampling import SamplingOptions
from diagd.families.checkpoints import find_model, load_model
from diagd.families.presets import PRESETS
from diagd.pipeline.first_stage import FirstStage, of_size
from diagd.tokenizers.text import TextIds
from tests.families.images import check_int8, diagonal_image
from tests.models.tiny import random_tokens

HEIGHT, WIDTH, SCALE, TEXT = 3, 5, 7.0, "a red house"
SIZE_PX, SIZE = (32 * HEIGHT, 32 * WIDTH), "96x160"
WIDE, LAYERS, HEADS, KV_HEADS, EPS, CODES, DRAWN = 32, 3, 4, 2, 1e-6, 24, 40
FIRST = 256 + 421  # bytes, and the names behind them
START, END = FIRST + 8, FIRST + 8 + CODES  # of the codes
IMAGE_TOKEN, IMAGE_START, IMAGE_END = FIRST + 5, FIRST + 6, FIRST + 7
VISUAL = torch.tensor([*range(START, END), FIRST])
KINDS = {
    "preview": {"kind": "mammothmoda2_qwen2_5_vl", "words": FIRST, "head_dim": 8, "theta": 1e6},
    "dev": {"kind": "mammothmoda2_qwen3_vl", "words": FIRST - 128, "head_dim": 12, "theta": 5e6},
}
GREEDY = SamplingOptions()


def random_release(folder: Path, name: str) -> Path:
    """Write a folder as its makers do: two shards, settings, tokens in base64 and their names."""
    kind, is_dev = KINDS[name], name == "dev"
    generator = torch.Generator().manual_seed(int(is_dev))
    weights = dict[str, Tensor]()

    def add(module: str, *shape: int, mean: float = 0.0) -> None:
        weights[f"llm_model.{module}"] = mean + 0.4 * torch.randn(*shape, generator=generator)

    add("model.language_model.embed_tokens.weight", kind["words"], WIDE)
    add("model.language_model.gen_embed_tokens.weight", DRAWN, WIDE)
    add("lm_head.weight", kind["words"], WIDE)
    add("gen_head.weight", DRAWN, WIDE)
    add("model.visual.blocks.0.norm1.weight", 4)
    add("model.language_model.norm.weight", WIDE, mean=1)
    for layer in range(LAYERS):
        at, width = f"model.language_model.layers.{layer}", HEADS * kind["head_dim"]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            add(f"{at}.{norm}.weight", WIDE, mean=1)
        sizes = zip("qkv", (width, width // 2, width // 2), strict=True)
        for part, size in sizes:
            add(f"{at}.self_attn.{part}_proj.weight", size, WIDE)
            if not is_dev:
                add(f"{at}.self_attn.{part}_proj.bias", size)
            elif part != "v":
                add(f"{at}.self_attn.{part}_norm.weight", kind["head_dim"], mean=1)
        add(f"{at}.self_attn.o_proj.weight", WIDE, width)
        for mlp in ("mlp", "gen_mlp") if layer else ("mlp",):
            for part in ("gate_proj", "up_proj"):
                add(f"{at}.{mlp}.{part}.weight", 48, WIDE)
            add(f"{at}.{mlp}.down_proj.weight", WIDE, 48)
    weights["gen_transformer.norm.weight"] = torch.ones(3)  # its second stage
    folder.mkdir(parents=True)
    names = sorted(weights)
    files = {one: f"model-{i % 2 + 1:05d}-of-00002.safetensors" for i, one in enumerate(names)}
    for file in set(files.values()):
        save_file({one: weights[one] for one in names if files[one] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    rope = {"type": "mrope", "rope_type": "mrope" if is_dev else "default"}
    text: dict[str, Any] = {
        **{"hidden_size": WIDE, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS},
        **{"rms_norm_eps": EPS, "max_position_embeddings": 400, "moe_type": "ffn-1:3"},
        **{"rope_scaling": {**rope, "mrope_section": [1, 1, 2]}, "hidden_act": "silu"},
        **{"gen_vocab_start_index": FIRST, "gen_vocab_size": DRAWN, "rope_theta": kind["theta"]},
    }
    llm = {"model_type": kind["kind"], "text_config": text}
    sizes = {"grid_height": HEIGHT, "grid_width": WIDTH, "gen_condition_layers": [-2, -4]}
    side = {"model_type": "mammothmoda2", "llm_config": llm, **sizes}
    (folder / "config.json").write_text(json.dumps(side))
    ids = {"eol_token_id": FIRST, "visual_token_start_id": START, "visual_token_end_id": END}
    (folder / "t2i_generation_config.json").write_text(json.dumps({**ids, "top_k": 9}))
    lines = (f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (folder / "mammothu.tiktoken").write_text("".join(lines))
    marks = ["<|image token|>", "<|image start|>", "<|image end|>"]
    marks += [f"<|visual token {code:06d}|>" for code in range(CODES)]
    (folder / "mammothu_vision_tokens.txt").write_text("\n".join(marks))
    return folder


class Plain:
    """Its decoder in the makers' ids: every layer in full, nothing kept, each id by itself."""

    def __init__(self, folder: Path, name: str) -> None:
        self.of = {
            n: w for f in sorted(folder.glob("*.safetensors")) for n, w in load_file(f).items()
        }
        self.head_dim, self.theta = KINDS[name]["head_dim"], KINDS[name]["theta"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
        return x * self.of[name] if name in self.of else x

    def heads(self, x: Tensor, at: str, part: str, positions: Tensor) -> Tensor:
        bias = self.of.get(f"{at}.{part}_proj.bias")
        out = functional.linear(x, self.of[f"{at}.{part}_proj.weight"], bias)
        out = out.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if part == "v":
            return out
        if f"{at}.{part}_norm.weight" in self.of:
            out = self.norm(out, f"{at}.{part}_norm.weight")
        pairs = torch.arange(0, self.head_dim, 2) / self.head_dim
        angles = positions[:, None] / self.theta**pairs
        a, b = out.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def states(self, tokens: Tensor, positions: Tensor, visible: Tensor) -> list[Tensor]:
        root = "llm_model.model.language_model"
        rows = [
            self.of[f"{root}.gen_embed_tokens.weight"][token - FIRST]
            if token >= FIRST
            else self.of[f"{root}.embed_tokens.weight"][token]
            for token in tokens.flatten().tolist()
        ]
        x = torch.stack(rows).view(*tokens.shape, WIDE)
        states = [x]
        for layer in range(LAYERS):
            at = f"{root}.layers.{layer}"
            normed = self.norm(x, f"{at}.input_layernorm.weight")
            own = [self.heads(normed, f"{at}.self_attn", part, positions) for part in "qkv"]
            keys, values = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in own[1:])
            scores = own[0] @ keys.transpose(-1, -2) / self.head_dim**0.5
            seen = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ values
            out = self.of[f"{at}.self_attn.o_proj.weight"]
            x = x + functional.linear(seen.transpose(1, 2).flatten(2), out)
            normed = self.norm(x, f"{at}.post_attention_layernorm.weight")
            by_mlp = {False: f"{at}.mlp", True: f"{at}.gen_mlp" if layer else f"{at}.mlp"}
            x = x + torch.stack(
                [
                    self.mlp(one, by_mlp[token >= FIRST])
                    for row, ids in zip(normed, tokens.tolist(), strict=True)
                    for one, token in zip(row, ids, strict=True)
                ]
            ).view_as(x)
            states.append(x)
        return [*states[:-1], self.norm(x, f"{root}.norm.weight")]

    def mlp(self, x: Tensor, at: str) -> Tensor:
        gate, up, down = (self.of[f"{at}.{one}_proj.weight"] for one in ("gate", "up", "down"))
        return functional.linear(functional.silu(x @ gate.T) * (x @ up.T), down)

    def logits(self, tokens: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """Return columns by id; between the tables, where there is no id, and for words, -inf."""
        last = self.states(tokens, positions, visible)[-1]
        drawn = functional.linear(last, self.of["llm_model.gen_head.weight"])
        return functional.pad(drawn, (FIRST, 0), value=-torch.inf)

    def causal(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        length = tokens.shape[1]
        return tokens, torch.arange(length), torch.ones(length, length).tril().bool()

    def raster(self, prompt: Tensor, scale: float) -> Tensor:
        """Write a picture greedily, (HEIGHT, WIDTH), the second row with the last 10 ids alone."""
        whole, other, codes = prompt, prompt[:, -10:], list[int]()
        for place in range(HEIGHT * (WIDTH + 1)):
            more, less = (self.logits(*self.causal(one))[0, -1] for one in (whole, other))
            guided = less + scale * (more - less)
            token = FIRST
            if place % (WIDTH + 1) < WIDTH:
                token = START + int(guided[START:END].argmax())
                codes.append(token - START)
            whole, other = (functional.pad(one, (0, 1), value=token) for one in (whole, other))
        return torch.tensor(codes).view(HEIGHT, WIDTH)


@pytest.fixture(scope="module", params=KINDS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(name, tmp_path_factory) -> Path:
    return random_release(tmp_path_factory.mktemp("mammoth") / name, name)


@pytest.fixture(scope="module")
def plain(folder, name) -> Plain:
    return Plain(folder, name)


@pytest.fixture(scope="module")
def stage(folder) -> FirstStage:
    return FirstStage.from_pretrained(folder, dtype="float32")


@pytest.fixture(scope="module")
def theirs(name) -> Tensor:
    """Their id of each of ours: codes, row end, what else is in the second table, words."""
    rest = [FIRST + 1 + i for i in range(7)] + [*range(END, FIRST + DRAWN)]
    return torch.tensor([*VISUAL.tolist(), *rest, *range(KINDS[name]["words"])])


def prompt_of(text: str) -> Tensor:
    """Spell out the request: names stand behind the 256 bytes, in order."""
    begin, end, size = 257, 258, [ord("5"), ord("*"), ord("3")]
    ids = [begin, *b"system\nYou are a helpful image generator.", end, ord("\n")]
    ids += [begin, *b"user\n", *text.encode(), end, ord("\n"), begin, *b"assistant\n"]
    return torch.tensor([[*ids, IMAGE_START, *size, IMAGE_TOKEN]])


@pytest.mark.proves("MammothModa2", "text")
def test_prompts_are_those_of_its_makers(stage, theirs):
    ids = stage._of_size(SIZE_PX)[1](TEXT)
    assert torch.equal(theirs[ids.prompt], prompt_of(TEXT))
    assert torch.equal(theirs[ids.unconditional], prompt_of(TEXT)[:, -10:])
    assert FIRST + 31 in theirs[stage._of_size(SIZE_PX)[1]("a <|visual token 000023|>").prompt]


def test_names_between_the_tables_of_dev_have_no_embedding(stage, name):
    prompts, text = stage._of_size(SIZE_PX)[1], "a <|extra_margin_217|>"
    if name == "preview":
        assert prompts(text).prompt.max() == DRAWN + FIRST - 1
    else:
        with pytest.raises(ValueError, match="text has tokens without an embedding: 'a <"):
            prompts(text)


@pytest.mark.proves("MammothModa2", "logits")
@torch.no_grad()
def test_logits_are_those_of_a_plain_reading(plain, folder, theirs):
    model = load_model(folder)
    tokens = random_tokens(2, 41, vocab_size=len(theirs))
    tokens[:, 1::3] = random_tokens(2, 14, vocab_size=DRAWN)  # of the second table
    expected = plain.logits(*plain.causal(theirs[tokens]))[..., theirs[:DRAWN]]
    torch.testing.assert_close(model.logits(tokens), expected, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_compiled_step_runs_both_mlps_and_chooses_by_id(folder, monkeypatch):
    model, tokens = load_model(folder), random_tokens(2, 9, vocab_size=2 * DRAWN)
    expected = model.logits(tokens)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(model.logits(tokens), expected)


@torch.no_grad()
def test_a_step_of_drawn_ids_runs_their_mlp_alone(folder):
    model, drawn = load_model(folder), random_tokens(1, 9, vocab_size=DRAWN)
    block: Any = model.model.blocks[2]
    expected = model.logits(drawn)
    block.mlp = None  # what is not there cannot run
    assert torch.equal(model.logits(drawn), expected)
    with pytest.raises(TypeError, match="NoneType"):
        model.logits(drawn + DRAWN)


@pytest.mark.proves("MammothModa2", "guidance", "raster")
@pytest.mark.parametrize("scale", [None, 1.0])
@torch.no_grad()
def test_raster_and_exact_decoding_are_a_plain_loop(plain, stage, scale):
    expected = plain.raster(prompt_of(TEXT), SCALE if scale is None else scale)
    assert len(expected.unique()) > 4
    for strategy in ("raster", "exact"):
        how = {"strategy": strategy, "sampling": GREEDY, "guidance": scale}
        (made,) = stage.generate(TEXT, SIZE_PX, **how)
        assert torch.equal(made.tokens, expected)


@pytest.mark.proves("MammothModa2", "guidance", "diagonals")
@pytest.mark.parametrize("row_lag", [1, 2])
@torch.no_grad()
def test_diagonals_are_those_of_a_decoder_without_a_cache(plain, stage, theirs, row_lag):
    """No token stands in for another: the end of a row is known and fed itself."""
    ours = theirs.argsort()
    prompt = ours[torch.searchsorted(theirs[ours], prompt_of(TEXT))]
    ids = TextIds(prompt, prompt[:, -10:])

    def full(fed: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        return plain.logits(theirs[fed], positions, visible)[..., VISUAL]

    expected = diagonal_image(full, ids, SCALE, CODES, HEIGHT, WIDTH, row_lag)
    (made,) = stage.generate(TEXT, SIZE_PX, strategy=f"k={row_lag}", sampling=GREEDY)
    assert torch.equal(made.tokens, expected[0, :, :-1])
    assert made.stats.num_steps == (HEIGHT - 1) * row_lag + WIDTH + 1


def test_pictures_of_a_batch_are_each_as_alone(stage):
    texts = [TEXT, "a boat beside it"]
    both = stage.generate(texts, SIZE_PX, seed=[5, 1], strategy="exact")
    for text, seed, made in zip(texts, (5, 1), both, strict=True):
        (alone,) = stage.generate(text, SIZE_PX, seed=seed, strategy="raster")
        assert torch.equal(made.tokens, alone.tokens)
    assert not torch.equal(both[0].tokens, both[1].tokens)


@torch.no_grad()
def test_hidden_states_are_those_of_one_pass_over_the_finished_sequence(stage, plain, name):
    (made,) = stage.generate(TEXT, SIZE_PX, strategy="k=1", seed=3)
    rows = functional.pad(made.tokens + START, (0, 1), value=FIRST).flatten()
    expected = torch.cat([prompt_of(TEXT)[0], rows, torch.tensor([IMAGE_END])])
    assert torch.equal(made.sequence, expected)
    states = plain.states(*plain.causal(made.sequence[None]))
    read = states[-1] if name == "preview" else (states[-2] + states[-4]) / 2
    torch.testing.assert_close(stage.hidden_states(made.sequence), read, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match=r"layers must be in \[-4, 3\], got \[-2, -5\]"):
        stage.model.hidden_states(torch.zeros(1, 2, dtype=torch.int64), (-2, -5))
    with pytest.raises(ValueError, match=f"ids of the model, got {FIRST + DRAWN}"):
        stage.hidden_states(torch.tensor([1, FIRST + DRAWN]))


@pytest.mark.parametrize(
    ("side_px", "tokens", "steps"), [(1024, 1056, (64, 95)), (2048, 4160, (128, 191))]
)
def test_sizes_have_the_steps_of_the_table(folder, side_px, tokens, steps):
    config = diagd.FrameFormat(side_px // 32, side_px // 32 + 1)
    assert config.grid.num_tokens == tokens == diagd.DiagonalSchedule.raster(config.grid).num_steps
    for row_lag, expected in zip((1, 2), steps, strict=True):
        assert diagd.DiagonalSchedule(config.grid, row_lag).num_steps == expected


def test_presets_read_in_a_step_what_the_released_models_do():
    """With the MLPs and the output rows of drawn ids alone: 13.3 and 14.2 GB in bfloat16."""
    for preset, gigabytes in (("preview", 13.3), ("dev", 14.2)):
        size = 2 * linear_parameters(PRESETS[f"mammothmoda2-{preset}"]) / 1e9
        assert size == pytest.approx(gigabytes, abs=0.05)


def edited(folder: Path, target: Path, kind: str | None = None, **text: Any) -> Path:
    copy = shutil.copytree(folder, target)
    side = json.loads((copy / "config.json").read_text())
    side["llm_config"]["text_config"] |= text
    side["llm_config"]["model_type"] = kind or side["llm_config"]["model_type"]
    (copy / "config.json").write_text(json.dumps(side))
    return copy


def test_a_config_may_be_flat_and_omit_where_the_second_table_begins(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "flat")
    side = json.loads((copy / "config.json").read_text())
    text = side["llm_config"].pop("text_config")
    del text["gen_vocab_start_index"]
    side["llm_config"] = text | side["llm_config"]
    (copy / "config.json").write_text(json.dumps(side))
    assert find_model(copy).config == find_model(folder).config


def test_tokens_are_drawn_as_the_makers_file_says(folder, tmp_path):
    def drawing(**changes: Any) -> tuple[float, int | None, float | None]:
        copy = shutil.copytree(folder, tmp_path / "copy", dirs_exist_ok=True)
        (copy / "t2i_generation_config.json").write_text(json.dumps(given | changes))
        found = find_model(copy)
        defaults = found.family.defaults(found)
        assert (defaults.guidance, defaults.row_ends) == (SCALE, True)
        return defaults.temperature, defaults.top_k, defaults.top_p

    given = json.loads((folder / "t2i_generation_config.json").read_text())
    assert drawing() == (1.0, 9, None)
    assert drawing(top_k=2, top_p=0.9, temperature=0.8) == (0.8, 3, 0.9)
    assert drawing(top_k=0, top_p=1.0, repetition_penalty=1.0) == (1.0, None, None)
    assert drawing(do_sample=False)[0] == 0
    del given["top_k"]
    assert drawing() == (1.0, 50, None)
    with pytest.raises(ValueError, match=r"t2i.*json: repetition_penalty must be 1.*, got 1.1"):
        drawing(repetition_penalty=1.1)
    with pytest.raises(ValueError, match=r"t2i.*json: .*top_k"):
        drawing(top_k=7.5)


def test_a_text_tokenizer_of_transformers_is_taken_instead(folder, tmp_path, stage):
    copy = shutil.copytree(folder, tmp_path / "copy")
    stage._of_size(SIZE_PX)[1].words.save_pretrained(copy)
    (copy / "mammothu.tiktoken").unlink()
    other = FirstStage.from_pretrained(copy, dtype="float32")
    expected = stage._of_size(SIZE_PX)[1](TEXT)
    assert torch.equal(other._of_size(SIZE_PX)[1](TEXT).prompt, expected.prompt)


@pytest.fixture
def draw(command, folder, tmp_path, monkeypatch):
    """Run `diagd generate` on the folder, where an empty folder is."""
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")

    def run(*flags, model=folder, text=TEXT):
        given = "--model", model, "--text", text, "--dtype", "float32"
        return command("generate", *given, *flags)

    return run


def test_the_command_writes_tokens(draw, stage):
    report = draw("--size", "128x96", "-k", 1, "--images", 2, "--json").document
    assert report["runs"][0]["num_steps"] == 3 + 3 + 1
    assert report["tokens"] == ["dream-0.safetensors", "dream-1.safetensors"]
    written = load_file("dream-1.safetensors")
    (made,) = stage.generate(TEXT, (128, 96), strategy="k=1", seed=1)
    assert torch.equal(written["tokens"], made.tokens)
    assert torch.equal(written["sequence"], made.sequence)
    assert draw().code == 0
    assert load_file("dream.safetensors")["tokens"].shape == (HEIGHT, WIDTH)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--size", "100x96"], "height must be a multiple of 32 pixels, got 100"),
        (["--size", "96x0"], "width must be a multiple of 32 pixels, got 0"),
        (["--size", "640x640"], "takes 420 tokens, the context holds 400 with the text"),
        (["--size", "576x640"], "prompt and grids take .* tokens, the context holds 400"),
        (["--size", "1024"], "size must look like HEIGHTxWIDTH .*, got '1024'"),
        (["-k", "9"], r"row_lag must be in \[1, width=6\], got 9"),
        (["--frames", "2"], "frames is for other models than MammothModa2"),
        (["--backend", "eager", "--dtype", "int8"], "int8 needs backend native or webgpu on the"),
        (["--text", " "], "expected a text, got an empty one"),
    ],
)
def test_flags_that_do_not_fit_are_refused(draw, tmp_path, flags, message):
    draw(*flags).assert_refused(message)
    assert not list((tmp_path / "out").iterdir())


def test_what_does_not_fit_is_said_in_one_line(draw, folder, tmp_path, command, name):
    def refused(message: str, model: Path) -> None:
        draw(model=model).assert_refused(message)
        assert not list((tmp_path / "out").iterdir())

    for given in ("attention", "ffn_attention-1:3", "ffn-a:3", 3):
        model = edited(folder, tmp_path / f"moe{given}".replace(":", "."), moe_type=given)
        refused(f"moe_type must be ffn or such as ffn-14:28, got {given!r}", model)
    refused(
        r"unknown tensors?: model.layers.1.visual_mlp",
        edited(folder, tmp_path / "layers", moe_type="ffn-2:3"),
    )
    other = edited(folder, tmp_path / "other", "gemma3")
    refused("model_type of llm_config must be mammothmoda2_qwen2_5_vl or .*, got 'gemma3'", other)
    refused(
        f"expected ids in the order words, row end, codes, got .* {DRAWN} ids from 100 on",
        edited(folder, tmp_path / "first", gen_vocab_start_index=100),
    )
    refused(
        "type must be default, got 'yarn'",
        edited(folder, tmp_path / "yarn", rope_scaling={"type": "yarn"}),
    )
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    if name == "preview":  # a bias that is not there is none of zeros
        shard = damaged / "model-00001-of-00002.safetensors"
        kept = {n: w for n, w in load_file(shard).items() if not n.endswith("proj.bias")}
        save_file(kept, shard)
        refused(r"\d missing tensors: model.layers.\d.self_attn.._proj.bias", damaged)
        shutil.copy(folder / shard.name, shard)
    names = damaged / "mammothu_vision_tokens.txt"
    names.write_text("<|image start|>\n<|image end|>\n<|image token|>")
    refused(
        f"<.image end.> must be {FIRST} and {IMAGE_END}, got {FIRST} and {IMAGE_END - 1}", damaged
    )
    names.unlink()
    refused("names of its visual tokens not found: .*mammothu_vision_tokens.txt", damaged)
    (damaged / "mammothu.tiktoken").unlink()
    refused("text tokenizer .* not found: .*mammothu.tiktoken", damaged)
    assert load_model(damaged).vocab_size == DRAWN  # tokens need none
    next(damaged.glob("model-00002*")).unlink()
    refused("not found: .*model-00002", damaged)
    command("generate", "--model", folder).assert_refused("MammothModa2 makes pictures of texts")
    outcome = command("convert", folder, tmp_path / "ours")
    outcome.assert_refused("its tokenizer: a diffusion transformer paints what it writes")
    assert not (tmp_path / "ours").exists()


@pytest.mark.proves("MammothModa2", "int8")
def test_int8_keeps_the_logits_of_both_mlps(folder, theirs):
    tokens = random_tokens(2, 41, vocab_size=len(theirs))
    tokens[:, 1::3] = random_tokens(2, 14, vocab_size=DRAWN)
    check_int8(folder, tokens, 0.2)  # Preview, whose weights here are rough: 0.14


@pytest.mark.proves("MammothModa2", "native")
def test_cpu_kernels_run_second_mlps_and_webgpu_refuses_them(folder):
    made = [
        FirstStage.from_pretrained(folder, dtype="float32", backend=backend).generate(
            TEXT, SIZE_PX, strategy="k=1", seed=3
        )[0]
        for backend in ("eager", "native")
    ]
    assert torch.equal(made[0].tokens, made[1].tokens)
    int8 = FirstStage.from_pretrained(folder, dtype="int8")
    (written,) = int8.generate(TEXT, SIZE_PX)
    assert written.stats.num_steps == made[0].stats.num_steps
    read = FirstStage.from_pretrained(folder, dtype=int8.model.dtype, backend="eager")
    expected = read.hidden_states(written.sequence)
    torch.testing.assert_close(int8.hidden_states(written.sequence), expected)
    with pytest.raises(ValueError, match="a second MLP"):
        prepare(load_model(folder), "webgpu")
    with pytest.raises(ValueError, match="no first stage of a hybrid model"):
        FirstStage.from_pretrained("doom")
    found = find_model(folder)
    assert of_size(found, 32, (64, 96)).config.frame == diagd.FrameFormat(2, 4)
