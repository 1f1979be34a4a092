"""The loss of a strategy, with gradients, of our model and of others with adapters of peft."""

import re
from pathlib import Path

import peft
import pytest
import torch

import diagd
from diagd.decoding.teacher_forcing import strategy_nll
from tests.oracles import tiny_llama
from tests.worlds import HEIGHT, NUM_CODES, WIDTH, model_config, random_model

PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"


def clips(num_frames: int = 3) -> torch.Tensor:
    """Draw clips whose tokens count on from left to right: easy to learn."""
    first = torch.randint(NUM_CODES, (2, num_frames, HEIGHT, 1), generator=torch.Generator())
    return (first + torch.arange(WIDTH)) % NUM_CODES


@pytest.mark.parametrize("strategy", ["raster", "k=1", "k=2,d=4/action"])
@pytest.mark.parametrize("kind", ["own", "hugging face"])
def test_it_is_the_mean_price_and_has_gradients(kind, strategy):
    actions = torch.full((2, 3, 1), NUM_CODES + 1)
    module = random_model(model_config()) if kind == "own" else tiny_llama(NUM_CODES + 4)
    model = module if kind == "own" else diagd.HuggingFaceModel(module)
    given = clips(), actions, diagd.parse_strategy(strategy)
    prefix = torch.full((2, 1), NUM_CODES + 2)
    loss = diagd.strategy_loss(model, *given, prefix=prefix)
    price = strategy_nll(model, *given, prefix=prefix).mean().item()
    assert loss.item() == pytest.approx(price, abs=1e-5)
    loss.backward()
    grads = [weight.grad for weight in module.parameters() if weight.grad is not None]
    assert len(grads) > 10
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft 0.21's use
def test_the_page_s_lines_train_an_adapter_of_any_causal_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    llama, base = tiny_llama(NUM_CODES), diagd.HuggingFaceModel(tiny_llama(NUM_CODES))
    names = {"llama": llama, "batches": [clips()] * 20}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(code, names)
    told = clips(), None, diagd.parse_strategy("k=1")
    before, after = (strategy_nll(m, *told).mean() for m in (base, names["model"]))
    assert after < before - 0.2
    again = peft.PeftModel.from_pretrained(tiny_llama(NUM_CODES), "adapter").base_model.model
    loaded = strategy_nll(diagd.HuggingFaceModel(again), *told).mean()
    assert loaded.item() == pytest.approx(after.item(), abs=1e-5)
    made = diagd.generate_tokens(
        names["model"], clips()[:, 0].flatten(1), "k=1", grid=diagd.TokenGrid(1, HEIGHT, WIDTH)
    )
    assert made.tokens.shape == (2, 1, HEIGHT, WIDTH)
