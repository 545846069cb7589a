"""The pretrained language models of the experiments, each with the settings that it runs well with."""

import difflib
from dataclasses import dataclass
from typing import Any

import torch

import ace_lens as ace


@dataclass(frozen=True)
class LanguageModel:
    """A pretrained model, and how to run it.

    Arguments:
        name: what the experiments call it.
        spec: where it comes from, as `ace.load_model` reads it.
        dtype: of the weights.
        batch_size: sequences a forward pass, of some tens of tokens each.
        device_map: `"auto"` for a model that may need several GPUs; None for one device.
    """

    name: str
    spec: str
    dtype: torch.dtype
    batch_size: int
    device_map: str | None = None

    def load(self) -> Any:
        """The model, as a `TransformerBridge`; errors are those of `ace.load_model`."""
        return ace.load_model(self.spec, dtype=self.dtype, device_map=self.device_map)


LANGUAGE_MODELS = {
    model.name: model
    for model in [
        LanguageModel("gpt2-small", "openai-community/gpt2", torch.float32, 64),
        LanguageModel("gpt2-medium", "openai-community/gpt2-medium", torch.float32, 32),
        LanguageModel("gpt2-large", "openai-community/gpt2-large", torch.float32, 32),
        # Weights of 16, 18 and 66 GB: one GPU of 24 GB, one of 24 GB, two of 48 GB or one of 80 GB.
        LanguageModel("llama-3.1-8b", "meta-llama/Llama-3.1-8B", torch.bfloat16, 16),
        LanguageModel("gemma-2-9b", "google/gemma-2-9b", torch.bfloat16, 8),
        LanguageModel("qwen2.5-32b", "Qwen/Qwen2.5-32B", torch.bfloat16, 8, device_map="auto"),
    ]
}


def language_model(name: str) -> LanguageModel:
    """The settings of a model of `LANGUAGE_MODELS`.

    Raises:
        ValueError: no such name; the message shows the nearest ones.
    """
    if name in LANGUAGE_MODELS:
        return LANGUAGE_MODELS[name]
    near = difflib.get_close_matches(name.rpartition("/")[2].lower(), LANGUAGE_MODELS, n=3, cutoff=0.5)
    raise ValueError(
        f"There are no settings for {name!r}. Nearest names: {', '.join(near or LANGUAGE_MODELS)}. Any other model "
        "loads with ace.load_model(...)."
    )
