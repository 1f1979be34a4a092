"""Released checkpoints in miniature against what their own code computes with them.

The goldens were made with the families' code on random weights; float32, so 1e-4 is far above
rounding (8e-6) and far below any wrong detail (0.01 and more).
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from diagd.decoding.engine import DiagonalEngine
from diagd.decoding.sampling import SamplingOptions, truncate
from diagd.decoding.schedule import DiagonalSchedule, TokenGrid
from diagd.families.checkpoints import find_model, load_model
from diagd.families.presets import PRESETS
from diagd.models.rotary import PositionTable, RotaryTable, rotary_frequencies_3d

FIXTURES = Path(__file__).parent.parent / "fixtures"
COSMOS = [f"cosmos_tiny_{letter}" for letter in "abcd"]
WHAM = ["wham_tiny", "wham_tiny_v2"]
MINEWORLD = ["mineworld_tiny", "mineworld_tiny_v256"]


def golden(name):
    return load_file(FIXTURES / name / "golden.safetensors")


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def feed_in_turn(model, tokens, prefill, context=None):
    """Return the logits of a prefill of so many tokens, and of the others one by one."""
    length = tokens.shape[1]
    cache = model.make_cache(len(tokens), length + 1, context)
    lanes = [torch.arange(prefill), *torch.arange(prefill, length)[:, None]]
    parts = []
    for slots in lanes:
        visible = slots[:, None] >= torch.arange(int(slots[-1]) + 1)
        parts.append(model.forward(tokens[:, slots], slots, slots, visible, cache))
    return parts[0], torch.cat(parts[1:], dim=1)


def raster_frame(model, prompt, height, width, **settings):
    """Decode one frame after the prompt, token by token; (B, height * width)."""
    engine = DiagonalEngine(model, height, width, batch_size=len(prompt), **settings)
    context = prompt.shape[1] // (height * width)
    engine.prefill(prompt, context)
    schedule = DiagonalSchedule.raster(TokenGrid(1, height, width))
    return next(engine.decode(schedule)).flatten(1)


@pytest.mark.parametrize("name", COSMOS)
@torch.no_grad()
def test_cosmos_logits_and_every_block_are_those_of_its_own_code(name):
    model, data = load_model(FIXTURES / name / "model.pt"), golden(name)
    blocks = []
    for block in model.model.layers:
        block.register_forward_hook(lambda module, inputs, output: blocks.append(output))
    close(model.logits(data["tokens"], data.get("context")), data["full_logits"])
    for i, output in enumerate(blocks):
        close(output, data[f"block_out_{i}"])


@pytest.mark.parametrize("name", ["cosmos_tiny_b", "cosmos_tiny_d"])
@torch.no_grad()
def test_cosmos_reads_a_text_of_which_only_a_part_may_be_seen(name):
    model, data = load_model(FIXTURES / name), golden(name)
    logits = model.logits(
        data["tokens"], data["context"], context_visible=data["context_mask_ragged"]
    )
    close(logits, data["full_logits_ragged"])


@pytest.mark.parametrize("name", COSMOS)
@torch.no_grad()
def test_cosmos_through_the_cache_is_cosmos_in_one_pass(name):
    model, data = load_model(FIXTURES / name), golden(name)
    prefill = data["prefill_logits"].shape[1]
    first, others = feed_in_turn(model, data["tokens"], prefill, data.get("context"))
    close(first, data["prefill_logits"])
    close(others, data["decode_logits"])


@pytest.mark.parametrize("name", COSMOS)
def test_cosmos_greedy_tokens_are_those_of_its_own_generate(name):
    model, data = load_model(FIXTURES / name), golden(name)
    tokens = raster_frame(model, data["greedy_prompt"], 4, 6, context=data.get("context"))
    assert torch.equal(tokens, data["greedy_tokens"])


@pytest.mark.parametrize("name", COSMOS)
def test_cosmos_position_tables_are_its_own(name):
    config, data = find_model(FIXTURES / name).config, golden(name)
    table, length = RotaryTable(config), config.max_positions
    close(table.cos, data["rope_cos"][:length, : config.head_dim // 2])
    close(table.sin, data["rope_sin"][:length, : config.head_dim // 2])
    if config.position_table:
        assert torch.equal(PositionTable(config).table.float(), data["abs_pos_emb"][:length])


@pytest.mark.parametrize("size", ["4b", "5b", "12b", "13b"])
def test_the_presets_have_the_tables_of_the_released_models(size):
    config, data = PRESETS[f"cosmos-{size}"], load_file(FIXTURES / "cosmos_real_tables.safetensors")
    time, space = rotary_frequencies_3d(config)
    torch.testing.assert_close(time, data[f"{size}.temporal_inv_freq"])
    torch.testing.assert_close(space, data[f"{size}.spatial_inv_freq"])
    positions, table = data[f"{size}.positions"], RotaryTable(config)
    inside = positions < config.max_positions  # beyond are the zero angles of their padding
    assert inside.sum() > 10
    for name, values in (("cos", table.cos), ("sin", table.sin)):
        expected = data[f"{size}.rope_{name}"][inside, : config.head_dim // 2]
        close(values[positions[inside]], expected)
    if config.position_table:
        rows = PositionTable(config).table[positions[inside]]
        assert torch.equal(rows, data[f"{size}.abs_pos_emb"][inside])


@pytest.mark.parametrize(
    ("key", "temperature", "top_p"), [("top_p_probs", 1.0, 0.8), ("top_p_probs_t07_p09", 0.7, 0.9)]
)
@pytest.mark.parametrize("name", COSMOS)
def test_cosmos_draws_from_the_probabilities_of_its_own_rule(name, key, temperature, top_p):
    data = golden(name)
    logits = data["prefill_logits"][:, -1]
    kept = truncate(logits / temperature, SamplingOptions(temperature, top_p=top_p))
    torch.testing.assert_close(kept.softmax(-1), data[key], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", WHAM)
@torch.no_grad()
def test_wham_logits_are_those_of_its_own_code(name):
    model, data = load_model(FIXTURES / name / "model.ckpt"), golden(name)
    close(model.logits(data["full_tokens"]), data["full_logits"])
    prefill = int(data["incremental_prefill_len"])
    first, others = feed_in_turn(model, data["incremental_tokens"], prefill)
    close(torch.cat([first[:, -1:], others], dim=1), data["incremental_logits"])


def image_ranges(config):
    """WHAM bans id 0 at a frame's first place."""
    ranges = torch.zeros(config.grid_height, config.grid_width, 2, dtype=torch.int64)
    ranges[..., 1] = config.image_vocab_size
    ranges[0, 0, 0] = 1
    return ranges


@pytest.mark.parametrize("name", WHAM)
def test_wham_greedy_tokens_are_its_own(name):
    model, data = load_model(FIXTURES / name), golden(name)
    prompt, actions = data["greedy_context_tokens"].split(
        [data["greedy_context_tokens"].shape[1] - 16, 16], dim=1
    )
    config = model.config
    engine = DiagonalEngine(
        model,
        config.grid_height,
        config.grid_width,
        num_action_tokens=16,
        batch_size=2,
        sampling=SamplingOptions(valid_range=image_ranges(config)),
    )
    frame = config.tokens_per_frame + 16
    engine.prefill(prompt, (prompt.shape[1] + 16) // frame)
    schedule = DiagonalSchedule.raster(TokenGrid(1, config.grid_height, config.grid_width))
    tokens = next(engine.decode(schedule, actions[:, None])).flatten(1)
    assert torch.equal(tokens[:, :24], data["greedy_image_tokens"])


@pytest.mark.parametrize("name", WHAM)
def test_wham_dreams_in_its_sliding_context_are_its_own(name):
    """The full context drops its oldest frame before every frame: keep_frames is one less."""
    model, data = load_model(FIXTURES / name), golden(name)
    config = model.config
    frame = config.tokens_per_frame + 16
    context = data["tokens"][:, frame:]  # all but the oldest step, the last action included
    kept = context.shape[1] // frame
    forced = data["dream_future_action_tokens"][:, :-1] + config.image_vocab_size
    actions = torch.cat([context[:, None, -16:], forced], dim=1)
    engine = DiagonalEngine(
        model,
        config.grid_height,
        config.grid_width,
        num_action_tokens=16,
        batch_size=2,
        keep_frames=kept,
        sampling=SamplingOptions(valid_range=image_ranges(config)),
    )
    engine.prefill(context[:, :-16], kept)
    schedule = DiagonalSchedule.raster(TokenGrid(3, config.grid_height, config.grid_width))
    dreamt = torch.stack([tokens.flatten(1) for tokens in engine.decode(schedule, actions)], dim=1)
    assert torch.equal(dreamt, data["dream_image_tokens"])
    assert engine.num_dropped_frames == 2


@pytest.mark.parametrize("name", WHAM)
@torch.no_grad()
def test_wham_predicts_the_actions_that_it_would_take(name):
    model, data = load_model(FIXTURES / name), golden(name)
    config, frame = model.config, model.config.tokens_per_frame + 16
    tokens = torch.cat([data["tokens"][:, frame:], data["next_step_image_tokens"][:, 0]], dim=1)
    offset = config.image_vocab_size
    for low, high in [(2 * i, 2 * i + 2) for i in range(12)] + [
        (24 + 11 * j, 35 + 11 * j) for j in range(4)
    ]:
        logits = model.logits(tokens)[:, -1, offset + low : offset + high]
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True) + offset + low], dim=1)
    assert torch.equal(tokens[:, -16:] - offset, data["next_step_action_tokens"][:, 0])


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("sample_probs_t0p9", SamplingOptions(0.9)),
        ("sample_probs_t0p9_p0p8", SamplingOptions(0.9, top_p=0.8, exclusive_top_p=True)),
        ("sample_probs_t0p9_p1p0", SamplingOptions(0.9, top_p=1.0, exclusive_top_p=True)),
        ("sample_probs_t1p0_k5", SamplingOptions(1.0, top_k=5)),
    ],
)
@pytest.mark.parametrize("name", WHAM)
def test_wham_draws_from_the_probabilities_of_its_own_rule(name, key, options):
    data = golden(name)
    low, high = data["sample_valid_range"].tolist()  # inclusive
    kept = truncate(data["sample_logits"][:, low : high + 1] / options.temperature, options)
    expected = data[key][:, low : high + 1]
    torch.testing.assert_close(kept.softmax(-1), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("case", ["small", "real"])
@pytest.mark.parametrize("name", MINEWORLD)
@torch.no_grad()
def test_mineworld_logits_are_those_of_its_own_code(name, case):
    model, data = load_model(FIXTURES / name / "model.ckpt"), golden(name)
    logits = model.logits(data[f"{case}.full.input_ids"])[0]
    close(logits[data[f"{case}.full.logits_positions"]], data[f"{case}.full.logits"])
    image = logits[:, : model.config.image_vocab_size]
    assert torch.equal(image.argmax(-1), data[f"{case}.full.argmax"])


def mineworld_dream(name, case, make_schedule):
    """Return our tokens of one of MineWorld's runs, (1, F * height * width)."""
    model, data = load_model(FIXTURES / name), golden(name)
    height, width = {"small": (4, 6), "real": (14, 24)}[case]
    actions = data[f"{case}.actions"].transpose(0, 1)  # (1, F, A)
    engine = DiagonalEngine(
        model,
        height,
        width,
        num_action_tokens=actions.shape[2],
        sampling=SamplingOptions(valid_range=(0, model.config.image_vocab_size)),
    )
    engine.prefill(data[f"{case}.prompt_ids"], 1)
    schedule = make_schedule(TokenGrid(actions.shape[1], height, width))
    return torch.cat([frame.flatten(1) for frame in engine.decode(schedule, actions)], dim=1)


@pytest.mark.parametrize("case", ["small", "real"])
@pytest.mark.parametrize("name", MINEWORLD)
def test_mineworld_greedy_tokens_are_its_own(name, case):
    tokens = mineworld_dream(name, case, DiagonalSchedule.raster)
    assert torch.equal(tokens, golden(name)[f"{case}.naive.tokens"])


def test_mineworld_diagonals_start_with_its_own_tokens_and_part_at_the_second_row():
    """Its lanes also see unwritten slots, and true row ends never reach its cache."""
    name = "mineworld_tiny"
    ours = mineworld_dream(name, "small", lambda grid: DiagonalSchedule.spatial(grid, 2))
    theirs = golden(name)["small.image_k2.tokens"]
    assert torch.equal(ours[:, :3], theirs[:, :3])
    assert not torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("name", "family"),
    [("cosmos_tiny_b", "Cosmos"), ("wham_tiny", "WHAM"), ("mineworld_tiny", "MineWorld")],
)
def test_a_folder_or_a_file_is_recognised_and_said_what_it_is(name, family, caplog):
    with caplog.at_level("INFO", logger="diagd"):
        load_model(FIXTURES / name)
    assert f": {family}" in caplog.text
    file = next(path for path in (FIXTURES / name).iterdir() if path.suffix in (".pt", ".ckpt"))
    assert find_model(file).config == find_model(FIXTURES / name).config


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_cosmos_weights_may_be_wrapped_and_prefixed_or_not(wrapped, prefix, tmp_path):
    weights = torch.load(FIXTURES / "cosmos_tiny_a" / "model.pt", weights_only=True)
    weights = {prefix + name.removeprefix("model."): value for name, value in weights.items()}
    weights[prefix + "layers.0.attention._extra_state"] = torch.zeros(1)
    torch.save({"model": weights} if wrapped else weights, tmp_path / "model.pt")
    shutil.copy(FIXTURES / "cosmos_tiny_a" / "config.json", tmp_path)
    found, expected = load_model(tmp_path), load_model(FIXTURES / "cosmos_tiny_a")
    assert found.config == expected.config
    for name, weight in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight)


def test_without_a_side_file_the_sizes_come_from_the_shapes(tmp_path):
    for name in ("cosmos_tiny_a/model.pt", "mineworld_tiny/model.ckpt", "wham_tiny/model.ckpt"):
        (tmp_path / Path(name).name).unlink(missing_ok=True)
        shutil.copy(FIXTURES / name, tmp_path)
    cosmos = find_model(tmp_path / "model.pt").config
    assert (cosmos.hidden_size, cosmos.num_layers, cosmos.num_heads) == (64, 3, 4)
    assert (cosmos.grid_height, cosmos.grid_width, cosmos.max_positions) == (40, 64, 12800)
    with pytest.raises(ValueError, match=r"WHAM checkpoint: nothing tells the number of heads of"):
        find_model(tmp_path / "model.ckpt")


def test_the_side_file_may_be_elsewhere(tmp_path):
    shutil.copy(FIXTURES / "wham_tiny" / "model.ckpt", tmp_path)
    (tmp_path / "heads.json").write_text('{"n_head": 2}')
    found = find_model(tmp_path / "model.ckpt", tmp_path / "heads.json").config
    assert found == find_model(FIXTURES / "wham_tiny").config  # the file itself tells the rest


def change(name, edit, tmp_path):
    """Copy a Cosmos checkpoint with other tensors."""
    weights = torch.load(FIXTURES / name / "model.pt", weights_only=True)
    edit(weights)
    torch.save(weights, tmp_path / "model.pt")
    shutil.copy(FIXTURES / name / "config.json", tmp_path)
    return tmp_path / "model.pt"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda w: w.pop("model.layers.1.feed_forward.w2.weight"),
            r"model\.pt: Cosmos checkpoint: 1 missing tensor: layers\.1\.feed_forward\.w2\.weight$",
        ),
        (
            lambda w: w.update({"model.layers.1.extra.weight": torch.zeros(2)}),
            r"model\.pt: Cosmos checkpoint: 1 unknown tensor: layers\.1\.extra\.weight$",
        ),
        (
            lambda w: w.update({"model.norm.weight": torch.zeros(3)}),
            r"mis-shaped tensor: model\.norm\.weight \(expected \(64,\), got \(3,\)\)",
        ),
        (
            lambda w: [w.pop(name) for name in list(w) if "tok_emb" in name],
            r"model\.pt: no checkpoint of WHAM, Cosmos, MineWorld: it holds model\.layers\.0",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_family_is_named(edit, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_model(change("cosmos_tiny_a", edit, tmp_path))


def test_a_folder_of_several_checkpoints_asks_which(tmp_path):
    for name in ("a.ckpt", "b.ckpt"):
        shutil.copy(FIXTURES / "wham_tiny" / "model.ckpt", tmp_path / name)
    with pytest.raises(ValueError, match=r"several checkpoints \(a\.ckpt, b\.ckpt\): name the one"):
        find_model(tmp_path)


def test_a_yaml_side_file_builds_no_objects(tmp_path):
    shutil.copy(FIXTURES / "mineworld_tiny" / "model.ckpt", tmp_path)
    evil = f"!!python/object/apply:pathlib.Path.touch [{tmp_path}/pwned]"
    (tmp_path / "config.yaml").write_text(evil)
    with pytest.raises(ValueError, match=r"config\.yaml: not valid YAML: could not determine"):
        find_model(tmp_path)
    assert not (tmp_path / "pwned").exists()


def test_hugging_face_llama_folders_are_read(tmp_path):
    weights = torch.load(FIXTURES / "mineworld_tiny_v256" / "model.ckpt", weights_only=True)
    plain = {
        name.removeprefix("transformer."): value
        for name, value in weights["state_dict"].items()
        if name.startswith("transformer.")
    }
    save_file(plain, tmp_path / "model.safetensors")
    fields = {"model_type": "llama", "num_attention_heads": 4, "max_position_embeddings": 1041}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert find_model(tmp_path).config == find_model(FIXTURES / "mineworld_tiny_v256").config
