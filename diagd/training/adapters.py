"""Training of adapters: a frozen base with low-rank factors (peft), a learnt stand-in, or both.

The factors change all linear layers of the blocks, with their names in every family. The learnt
stand-in is one vector, fed where a row starts before its predecessor is known.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from diagd.backends.linears import Int8Linear
from diagd.families.adapters import ADAPTER_FILE, STAND_IN, TENSORS_FILE, config_with_stand_in
from diagd.files import write_json, write_text
from diagd.models.transformer import Transformer
from diagd.training.options import ADAPTED, FinetuneOptions
from diagd.weight_files import write_weights

ALPHA = 8  # of the factors' product, divided by the rank's root: one learning rate fits all ranks


class StandInEmbedding(nn.Module):
    """A frozen embedding, and a trained row behind its last one."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.stand_in = nn.Parameter(embedding.weight.detach().float().mean(0))

    @property
    def weight(self) -> Tensor:
        return self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        is_apart = ids == self.embedding.num_embeddings
        known = self.embedding(ids.masked_fill(is_apart, 0))
        return torch.where(is_apart[..., None], self.stand_in.to(known.dtype), known)


def attach(model: Transformer, options: FinetuneOptions, dtype: torch.dtype) -> None:
    """Freeze a model, its linear layers in `dtype` or int8, and add what is to be trained."""
    from peft import LoraConfig, inject_adapter_in_model  # slow to import

    model.requires_grad_(False)
    stack, blocks = model.model, model.model.layers
    if options.lora:
        found = {name.rpartition(".")[2] for name, part in blocks.named_modules()}
        names = [name for name in ADAPTED if name in found]
        config = LoraConfig(r=options.lora, lora_alpha=ALPHA, use_rslora=True, target_modules=names)
        with torch.random.fork_rng([]):
            torch.manual_seed(options.seed)  # of the first factors; the second ones are zero
            inject_adapter_in_model(config, blocks)
    for part in list(model.modules()):
        for name, child in list(part.named_children()):
            frozen = (
                child if isinstance(child, nn.Linear) and not child.weight.requires_grad else None
            )
            if frozen is not None and options.int8:
                setattr(part, name, Int8Linear(frozen))
            else:  # the same numbers as autocast on a model in float32
                for weight in child.parameters(recurse=False):
                    weight.data = weight.data.to(torch.float32 if frozen is None else dtype)
    if options.stand_in:
        stack.add_module("embed_tokens", StandInEmbedding(stack.embed_tokens))
        model.config = config_with_stand_in(model.config)


@dataclass
class AdapterFolder:
    """What a run writes instead of a world: tensors, `adapter.json` and a card."""

    options: FinetuneOptions
    base_sha256: str
    before: Mapping[str, float] | None = None  # nats a token of the base, by strategy

    @property
    def of_base(self) -> FinetuneOptions:
        return replace(self.options, stand_in=False, int8=False)

    def __call__(self, weights: Mapping[str, Tensor]) -> None:
        """Write the trained tensors of a state dict."""
        trained = {
            name.removeprefix("model.embed_tokens.").replace(".default.", "."): weight
            for name, weight in weights.items()
            if ".lora_" in name or name.endswith(STAND_IN)
        }
        write_weights(self.options.out / TENSORS_FILE, trained)
        self.describe()

    def describe(self, after: Mapping[str, float] | None = None) -> None:
        """Write adapter.json and the card; `after` has prices in the order of `before`."""
        options, folder = self.options, self.options.out
        learnt = [str(one) for one in options.mixture if getattr(one, "row_start", "") == "learnt"]
        about: dict[str, Any] = {
            "base": options.init,
            "base_sha256": self.base_sha256,
            "rank": options.lora or 0,
            "scale": ALPHA / (options.lora or 1) ** 0.5,
            "decoding": learnt[0] if learnt else None,
            "strategies": options.purpose()["strategies"],
        }
        if self.before and after:
            rows = zip(self.before.values(), after.items(), strict=True)
            about["nats_per_token"] = [
                {"strategy": name, "before": old, "after": new} for old, (name, new) in rows
            ]
        write_json(folder / ADAPTER_FILE, about, indent=1)
        write_text(folder / "README.md", card_of(about, folder.name))


def card_of(about: Mapping[str, Any], name: str) -> str:
    """Format a card: the base, what was trained, what it costs, and how to use it."""
    trained = [f"low-rank factors of rank {about['rank']}"] if about["rank"] else []
    trained += ["a learnt stand-in at row starts"] if about["decoding"] else []
    prices = [
        f"| `{row['strategy']}` | {row['before']:.4f} | {row['after']:.4f} |"
        for row in about.get("nats_per_token", ())
    ]
    head = "| strategy | base, nats a token | with the adapter |\n|---|---|---|\n"
    table = head + "\n".join(prices) + "\n" if prices else ""
    return f"""---
library_name: diagd
tags: [world-model, adapter]
---

# {name}

An adapter of `{about["base"]}` for diagonal decoding: {" and ".join(trained)},
trained under `{about["strategies"]}`. The base's weights have the SHA-256
`{about["base_sha256"]}`; others are refused.

```bash
diagd generate --model {about["base"]} --adapter {name}
```

{table}"""
