"""Size a run to the time there is: measure how fast this machine trains, choose by one rule.

The rule: the largest model that sees at least 3 tokens for each of its weights. Tokens that are
read again teach less: n passes over the same data are worth 1 + 15 * (1 - exp(-(n - 1) / 15))
passes over new data (arXiv:2305.16264), and after 40 passes a run ends even if there is time left.
"""

import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta

import torch

from diagd.console import waiting
from diagd.families.presets import WORLD_SIZES
from diagd.files import write_json
from diagd.models.config import ModelConfig
from diagd.models.transformer import Transformer
from diagd.tokenizers.shards import TokenClips
from diagd.training.mixture import MixtureLoss, corruption_of, views_of
from diagd.training.options import MixtureOptions
from diagd.training.sequences import draw_batch
from diagd.training.setup import faster_precision, fit_config, make_optimizers

TOKENS_A_WEIGHT = 3.0
WORTH_OF_PASSES = 15.0
MOST_PASSES = 40
USEFUL_PASSES = 8  # beyond them, more clips would teach more than more time
PLAN_FILE = "plan.json"
PROBED = ("mc-ar-128x3", "mc-ar-256x5")
PROBE_STEPS = 3
PROBE_SHARE = 0.1  # of the time, at most, but for a step that is under way


@dataclass(frozen=True)
class RunPlan:
    """What a run in a given time comes to.

    Attributes:
        model: name of a preset.
        weights: of the model.
        sized: whether the model was chosen, not named.
        steps: where the run ends even if there is time left.
        tokens: about as many are read.
        data_tokens: so many there are to read.
    """

    model: str
    weights: int
    sized: bool
    steps: int
    tokens: float
    data_tokens: int

    @property
    def passes(self) -> float:
        """How often every clip is read."""
        return self.tokens / self.data_tokens

    @property
    def worth(self) -> float:
        """How many new tokens would teach as much."""
        again = max(self.passes - 1, 0.0)
        worth = 1 + WORTH_OF_PASSES * (1 - math.exp(-again / WORTH_OF_PASSES))
        return self.data_tokens * min(self.passes, worth)

    def describe(self, seconds: float) -> str:
        """Say in a few lines what to expect of a run that has so many seconds left."""
        ends = datetime.now() + timedelta(seconds=seconds)
        model = f"{self.model}, {_count(self.weights)} weights"
        if self.sized:
            model += f": as large as {TOKENS_A_WEIGHT:g} tokens a weight allow, or the smallest"
        lines = [
            model,
            f"until {ends:%H:%M} at the latest: about {_count(self.tokens)} tokens, "
            f"{self.passes:.1f} passes over the {_count(self.data_tokens)} of the clips "
            "(the bundled world: 8.3M weights, 29M tokens, 1.3 passes)",
        ]
        if self.passes >= MOST_PASSES:
            lines.append(f"it ends after {MOST_PASSES} passes: further ones teach next to nothing")
        if self.passes > USEFUL_PASSES:
            lines.append("more clips would teach it more than more time")
        return "\n".join(lines)


def plan_run(options: MixtureOptions, clips: TokenClips, model: str | None) -> RunPlan:
    """Choose a model for the time, or take the one named; the plan of a killed run is kept.

    Raises:
        ValueError: several processes, of which only one would be measured.
    """
    path = options.out / PLAN_FILE
    if path.is_file():
        plan = RunPlan(**json.loads(path.read_text(encoding="utf-8")))
        return plan if model is None else replace(plan, model=model)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if model is None and processes > 1:
        raise ValueError("a model is sized on one process: with several, name it by --model")
    assert options.seconds is not None
    started, costs = time.monotonic(), list[tuple[int, float]]()
    with waiting("measuring how fast this machine trains"):
        for name in PROBED if model is None else [model]:
            left = PROBE_SHARE * options.seconds - (time.monotonic() - started)
            if not costs or left > 0:
                costs.append(_probe(options, clips, name, left))
    if len(costs) == 1:  # a step that took that long is all arithmetic: it grows with the weights
        costs.insert(0, (0, 0.0))
    seconds_left = options.seconds - (time.monotonic() - started)
    data_tokens = len(clips.tokens) * clips.tokens.shape[1] * (clips.tokens[0, 0].numel() + 1)
    step = processes * options.batch_of(clips) * options.length_of(clips)
    steps = math.ceil(MOST_PASSES * data_tokens / step)
    most = min(options.steps or steps, steps) * step
    plan = None
    for name in WORLD_SIZES if model is None else [model]:
        weights = num_weights(fit_config(name, clips, options.frames_held))
        seconds = _seconds_per_token(costs, weights) / processes
        tokens = min(seconds_left / seconds, most)
        larger = RunPlan(name, weights, model is None, steps, tokens, data_tokens)
        if plan is None or larger.worth >= TOKENS_A_WEIGHT * weights:
            plan = larger
    assert plan is not None
    write_json(path, asdict(plan))
    return plan


def num_weights(config: ModelConfig) -> int:
    """Count the weights of a model; makes none."""
    with torch.device("meta"):
        return sum(weight.numel() for weight in Transformer(config).parameters())


def _probe(
    options: MixtureOptions, clips: TokenClips, model: str, limit: float
) -> tuple[int, float]:
    """Train a model for some steps; return its weights, and the seconds a token takes.

    Args:
        limit: seconds after which no other step begins.
    """
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = fit_config(model, clips, options.frames_held)
    probe = Transformer.random(config, 0, device)
    views = views_of(options, config.grid_height, config.grid_width)
    wrong = corruption_of(options, clips.codebook_size)
    loss_of = MixtureLoss(replace(options, compile=False), views, device, wrong)
    optimizers = make_optimizers(probe, options.optimizer, options.learning_rate, 0.0)
    precision = faster_precision() if options.precision == "auto" else options.precision
    times: list[float] = []
    for step in range(1 + PROBE_STEPS):  # the first one prepares
        started = time.monotonic()
        tokens = draw_batch(clips, options.frames, options.batch_of(clips), step).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of(probe, tokens, step)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        loss.item()
        times.append((time.monotonic() - started) / tokens.numel())
        if time.monotonic() - began > limit:
            break
    taken = statistics.median(times[1:] or times)
    return sum(weight.numel() for weight in probe.parameters()), taken


def _seconds_per_token(costs: Sequence[tuple[int, float]], weights: int) -> float:
    """Extrapolate along the line through what was measured: a fixed part, and one by weights."""
    (few, fast), (many, slow) = costs[0], costs[-1]
    slope = max(slow - fast, 0.0) / (many - few) if many > few else 0.0
    return max(fast + slope * (weights - few), 0.5 * fast)


def _count(number: float) -> str:
    return f"{number / 1e6:.1f}M" if number >= 1e6 else f"{number / 1e3:.0f}k"
