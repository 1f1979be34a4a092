from dataclasses import replace

import pytest
import torch

from diagd.families.checkpoints import load_model
from diagd.families.presets import PRESETS
from diagd.tokenizers.shards import codebook_fingerprint
from diagd.tokenizers.vq import VQTokenizer
from diagd.training import setup
from diagd.training.sequences import draw_batch
from diagd.training.setup import (
    FloatMuon,
    check_fit,
    fit_config,
    make_optimizers,
    start_model,
)
from tests.worlds import SHARD_CODES as NUM_CODES
from tests.worlds import clips_of, model_config, tokenizer, write_shard_model


def test_the_preset_is_fitted_to_the_data(monkeypatch):
    monkeypatch.setitem(PRESETS, "mc-ar-tiny", model_config())
    config = fit_config("mc-ar-tiny", clips_of(), 3)
    assert (config.vocab_size, config.image_vocab_size) == (NUM_CODES + 3, NUM_CODES)
    assert (config.grid_height, config.grid_width, config.num_action_tokens) == (2, 3, 1)
    assert config.max_positions == draw_batch(clips_of(), 3, 1, 0).shape[1]
    assert config.hidden_size == model_config().hidden_size


def test_tokens_of_another_tokenizer_do_not_fit_a_model_that_brings_its_own(tmp_path):
    write_shard_model(tmp_path)
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    own = codebook_fingerprint(VQTokenizer.from_pretrained(tmp_path / "tokenizer"))
    config = load_model(tmp_path).config
    for codebook in ("", own):  # older shards do not say whose they are
        check_fit(str(tmp_path), config, replace(clips_of(), codebook=codebook))
    with pytest.raises(ValueError, match=r"do not match .*: they were tokenized with another"):
        check_fit(str(tmp_path), config, replace(clips_of(), codebook="0" * 16))


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_muon_of_float32_steps_as_torchs_does(shape):
    """Up to the rounding of bfloat16, which torch's is computed in."""
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(shape, generator=generator) for _ in range(4))
    ended = []
    for kind in (FloatMuon, torch.optim.Muon):
        weight = torch.nn.Parameter(start.clone())
        optimizer = kind([weight], 0.02, 0.1, adjust_lr_fn="match_rms_adamw")
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        ended.append((weight.detach(), optimizer.state_dict()["state"][0]["momentum_buffer"]))
    (ours, our_average), (theirs, their_average) = ended
    assert torch.equal(our_average, their_average)
    assert (ours - theirs).norm() < 0.02 * (theirs - start).norm()


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_all_else_once(options):
    model = start_model(model_config(), seed=0)
    muon, adamw = make_optimizers(model, options(optimizer="muon", weight_decay=0.2))
    assert isinstance(muon, torch.optim.Muon)
    assert type(adamw) is torch.optim.AdamW
    blocks = [id(p) for name, p in model.named_parameters() if "layers" in name and p.ndim == 2]
    assert [id(p) for p in muon.param_groups[0]["params"]] == blocks
    others = [id(p) for group in adamw.param_groups for p in group["params"]]
    assert sorted(others + blocks) == sorted(id(p) for p in model.parameters())
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.2, 0.0]


def test_muon_is_that_of_the_gpu_that_will_train(options, monkeypatch):
    """The model is still on the processor when its optimizers are made."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(setup, "multiplies_bfloat16", lambda device: device.type == "cuda")
    muon, _ = make_optimizers(start_model(model_config(), seed=0), options(optimizer="muon"))
    assert type(muon) is torch.optim.Muon
