"""Subject-verb agreement in pretrained language models: one axis, found, flipped, and shared between models.

After "The lamp near the chairs" a model has to say "is", not "are". A core of one dimension is extracted at every
layer; the layer is chosen on training prompts; and what is reported comes from prompts that share neither nouns nor
frames with those.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from scipy.stats import binomtest
from torch import Tensor
from tqdm import tqdm

import ace_lens as ace
from ace_lens.experiments.agreement_answers import answer_sets
from ace_lens.experiments.agreement_files import load_prompts
from ace_lens.experiments.agreement_prompts import AgreementPrompt, frame_folds, make_prompts, prompt_samples
from ace_lens.experiments.language_models import LANGUAGE_MODELS, language_model
from ace_lens.reports import Report

COPULAS = {"is": False, "was": False, "are": True, "were": True}
"""Whether a copula is plural."""
N_FOLDS = 4
"""Training prompts choose the layer in so many folds that share no frame."""
CONTROL_PROMPTS = 100
N_DRAWS = 16
BEYOND = 1.5
"""How far adaptive flips bring the margin to the other side; chosen on training prompts of SmolLM2-135M."""
TRANSFERRED = 400
"""At most so many prompts of a further file are tried."""


@dataclass(frozen=True)
class AgreementConfig:
    """Find, flip and compare the axis of grammatical number in language models."""

    model: Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
    """A model: a name of this library's settings (gpt2-small, gpt2-medium, gpt2-large, llama-3.1-8b, gemma-2-9b,
    qwen2.5-32b), a name on the Hugging Face hub, a folder, or a GGUF file. Several models are compared."""
    prompts: Path | None = None
    """Prompts of your own in place of those made here: BLiMP or prefix/answer JSON lines, or CSV. Half of them, drawn
    at random, are held out."""
    transfer: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction] = ()
    """Further files of prompts, on which the same cores are tried without refitting."""
    out: Path = Path("ace-lens-agreement")
    """Folder for results.json, the cores and the figure."""
    n_prompts: int = 200
    """Prompts of each number, as many for training as held out."""
    n_continued: int = 40
    """Held-out prompts of each number that are continued: plainly, flipped, and with adaptive flips."""
    n_new_tokens: int = 12
    """Tokens in a continuation."""
    batch_size: int | None = None
    """Prompts in a forward pass; by default as this library's settings have it, or 64."""
    seed: int = 0
    """Draws prompts, resamples, permutations and controls."""
    progress: bool = True
    """Show progress bars."""


@dataclass(frozen=True)
class SweepRow:
    """ROC AUC on held-out prompts with interventions on the core of one layer; intervals are 95%, over prompts."""

    layer: int
    keep: float
    keep_interval: tuple[float, float]
    remove: float
    remove_interval: tuple[float, float]
    flip: float
    flip_interval: tuple[float, float]


@dataclass(frozen=True)
class Continuation:
    """What a model writes after a prompt by itself, with its core flipped, and with adaptive flips."""

    prompt: str
    plain: str
    flipped: str
    adaptive: str


@dataclass(frozen=True)
class Steered:
    """What steering does to continuations that begin with the right copula.

    Arguments:
        n_changed: those that, steered, begin with a copula in the other number.
        changed: as a share.
        interval: its 95% interval (Wilson).
        perplexity: of the steered continuations under the plain model; None if there is no text in them.
    """

    n_changed: int
    changed: float
    interval: tuple[float, float]
    perplexity: float | None


@dataclass(frozen=True)
class Generation:
    """Greedy continuations of held-out prompts, steered wherever the model predicts a token.

    Arguments:
        n_prompts: prompts continued.
        n_right: those whose plain continuation begins with a copula, in the head's number. (Further on, a copula may
            have another subject.) What follows is on these.
        perplexity: of plain continuations under the plain model.
        flip: with the core flipped, in `model.generate`; None without right continuations.
        adaptive: with the core flipped by the smallest strength that makes the strongest verb of the other number win
            by 1.5 times as much as the right one did, and left where no strength up to 4 does; None likewise.
        examples: the first few of them.
    """

    n_prompts: int
    n_right: int
    perplexity: float | None = None
    flip: Steered | None = None
    adaptive: Steered | None = None
    examples: tuple[Continuation, ...] = ()


@dataclass(frozen=True)
class TransferRow:
    """ROC AUC of a core on prompts of another source, without refitting."""

    file: str
    n_prompts: int
    base: ace.Estimate
    keep: ace.Estimate
    remove: ace.Estimate
    flip: ace.Estimate


@dataclass(frozen=True)
class ModelResult:
    """What was found in one model. Scores are ROC AUC on held-out prompts, intervals 95% over prompts.

    Arguments:
        name: the model.
        n_layers: its blocks.
        layer: the block behind which the core lies, chosen on training prompts.
        left_out: verbs that are several tokens, with their tokens, and so were left out of the margin.
        base_auc: without intervention; and so on for `keep_auc`, `remove_auc`, `flip_auc`, at that layer.
        knob_r2: R^2 of the margin, as a line in the core coordinate that is fitted on training prompts.
        turned: the share of prompts whose margin some flip of a strength up to 4 turns round.
        median_strength: of the smallest such flips; 1 is the exact flip.
        outside_kl: KL(plain || edited) in nats over tokens other than the verbs, for keep, remove and flip.
        sweep: every layer.
        controls: other subspaces of one dimension at the chosen layer.
        generation: continuations with the core flipped.
        transfer: the same core on prompts of other sources.
        coordinates: the core coordinate of each held-out prompt.
        margins: the margin of each held-out prompt, without intervention.
        plural: whether the head of each held-out prompt is plural.
    """

    name: str
    n_layers: int
    layer: int
    left_out: dict[str, tuple[str, ...]]
    base_auc: float
    base_interval: tuple[float, float]
    keep_auc: float
    keep_interval: tuple[float, float]
    remove_auc: float
    remove_interval: tuple[float, float]
    flip_auc: float
    flip_interval: tuple[float, float]
    knob_r2: float
    turned: float
    median_strength: float
    outside_kl: dict[str, float]
    sweep: list[SweepRow]
    controls: ace.Controls
    generation: Generation
    transfer: list[TransferRow]
    coordinates: list[float]
    margins: list[float]
    plural: list[bool]


@dataclass(frozen=True)
class PairResult:
    """How alike the cores of two models are, on the same held-out prompts.

    Arguments:
        models: their names.
        spearman: the rank correlation of core coordinates.
        interval: its 95% interval.
        p: the share of shuffled prompts that correlate at least as strongly.
        within_number: the rank correlation among prompts of one number, the mean of both: what the cores share beyond
            the number itself.
        random_spearman: the largest absolute correlation of random axes of the first model with the second's core.
        transplants: the first model's core into the second, and the second's into the first.
    """

    models: tuple[str, str]
    spearman: float
    interval: tuple[float, float]
    p: float
    within_number: float
    random_spearman: float
    transplants: tuple[ace.Transplant, ace.Transplant]


@dataclass(frozen=True)
class AgreementResults(Report):
    """The experiment's results, as they stand in results.json."""

    config: dict[str, Any]
    models: list[ModelResult]
    pairs: list[PairResult] = field(default_factory=list)

    def __str__(self) -> str:
        lines = ["Subject-verb agreement: ROC AUC of the margin between plural and singular verbs on held-out prompts,"]
        lines += ["95% intervals. Layers were chosen on training prompts.", ""]
        width = max(len(model.name) for model in self.models)
        titles = "  ".join(f"{title:<20}" for title in ("none", "keep", "remove", "flip"))
        lines.append(f"{'model':<{width}}  {'layer':<7}  {titles}  {'knob R2':>7}")
        for model in self.models:
            cells = "  ".join(
                f"{f'{value:.3f} [{low:.3f}, {high:.3f}]':<20}"
                for value, (low, high) in (
                    (getattr(model, f"{name}_auc"), getattr(model, f"{name}_interval"))
                    for name in ("base", "keep", "remove", "flip")
                )
            )
            layer = f"{model.layer}/{model.n_layers}"
            lines.append(f"{model.name:<{width}}  {layer:<7}  {cells}  {model.knob_r2:>7.3f}")
        for model in self.models:
            lines += ["", *_model_lines(model)]
        if self.pairs:
            lines += ["", "Core coordinates of two models on the same held-out prompts:"]
        for pair in self.pairs:
            low, high = pair.interval
            lines.append(
                f"{' and '.join(pair.models)}: Spearman {pair.spearman:.3f} [{low:.3f}, {high:.3f}], p = {pair.p:.2g}; "
                f"within one number {pair.within_number:.3f}; random axes reach {pair.random_spearman:.3f}"
            )
            for receiver, transplant in zip(reversed(pair.models), pair.transplants, strict=True):
                lines.append(
                    f"  transplanted into {receiver}: {transplant.transplanted} (its own {transplant.baseline}, "
                    f"shuffled {transplant.shuffled}, random donor {transplant.from_random})"
                )
        return "\n".join(line.rstrip() for line in lines)


def _model_lines(model: ModelResult) -> list[str]:
    generation = model.generation
    lines = [f"{model.name}, block {model.layer}: controls of one dimension"]
    lines += [f"  {'subspace':<22}  {'keep':<22}  {'remove':<22}  {'flip'}"]
    for row in model.controls.rows:
        cells = "  ".join(f"{f'{getattr(row, name):.3f}':<22}" for name in ("keep", "remove", "flip"))
        lines.append(f"  {row.name:<22}  {cells}")
    kl = ", ".join(f"{name} {value:.3f}" for name, value in model.outside_kl.items())
    lines.append(f"KL over all other tokens: {kl}")
    lines.append(
        f"the smallest flips that turn the margin: median strength {model.median_strength:.2f}, found for "
        f"{model.turned:.0%} of the prompts"
    )
    if model.left_out:
        split = ", ".join(f"{verb!r} {list(pieces)}" for verb, pieces in model.left_out.items())
        lines.append(f"left out of the margin, being several tokens: {split}")
    for row in model.transfer:
        lines.append(
            f"{row.file} ({row.n_prompts} prompts): none {row.base}, keep {row.keep}, remove {row.remove}, "
            f"flip {row.flip}"
        )
    lines.append(
        f"greedy continuations: {generation.n_right} of {generation.n_prompts} prompts go on with a right copula"
        + _in_brackets(generation.perplexity)
    )
    for name, turned in (("core flipped", generation.flip), ("adaptive flips", generation.adaptive)):
        if turned is not None:
            low, high = turned.interval
            lines.append(
                f"  {name}: {turned.n_changed} of those begin with a copula in the other number, "
                f"{turned.changed:.0%} [{low:.0%}, {high:.0%}]{_in_brackets(turned.perplexity)}"
            )
    for example in generation.examples:
        lines += [f"  {example.prompt}"]
        lines += [f"    {name:<8}  {_marked(getattr(example, name))}" for name in ("plain", "flipped", "adaptive")]
    return lines


def _in_brackets(perplexity: float | None) -> str:
    return "" if perplexity is None else f" (perplexity {perplexity:.1f})"


@dataclass(frozen=True)
class _Found:
    """A model with its core, and the samples of the same prompts in its own tokens."""

    result: ModelResult
    model: Any
    core: ace.Core
    target: ace.LogitMargin
    train: ace.Samples
    held_out: ace.Samples
    batch_size: int


def run_agreement(config: AgreementConfig) -> AgreementResults:
    """Find the core of every model, prove it on held-out prompts, and compare the models.

    After each model the results so far and its core are written to `config.out`, so that an interruption costs no more
    than one model.

    Raises:
        ValueError: no model, two of one name, or prompts of one number only.
        LoadingError: a model that cannot be had.
    """
    if not config.model:
        raise ValueError("Name a model: --model gpt2-small, a name on the hub, a folder, or a GGUF file.")
    names = [_name(spec) for spec in config.model]
    if again := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"There are two models called {', '.join(again)}, whose results would be mixed up. Rename one."
        )
    generator = torch.Generator().manual_seed(config.seed)
    train, held_out = _prompts(config, generator)
    transfer = {path.name: _some(load_prompts(path), TRANSFERRED, generator) for path in config.transfer}
    about = {
        "model": list(config.model),
        "prompts": None if config.prompts is None else config.prompts.name,
        "n_train": len(train),
        "n_held_out": len(held_out),
        "seed": config.seed,
    }
    config.out.mkdir(parents=True, exist_ok=True)
    results, found = AgreementResults(about, []), []
    for spec in config.model:
        found.append(_find(config, spec, train, held_out, transfer))
        found[-1].core.save(core_path(config.out, found[-1].result))
        results.models.append(found[-1].result)
        results.save(config.out / "results.json")
    results.pairs.extend(_compare(first, second, config.seed) for first, second in itertools.combinations(found, 2))
    results.save(config.out / "results.json")
    return results


def core_path(folder: Path, model: ModelResult) -> Path:
    """Where a model's core lies in the folder of the results."""
    return folder / f"core-{model.name.replace('/', '--')}.safetensors"


def _prompts(
    config: AgreementConfig, generator: torch.Generator
) -> tuple[list[AgreementPrompt], list[AgreementPrompt]]:
    """Training and held-out prompts."""
    if config.prompts is None:
        train, held_out = (make_prompts(config.n_prompts, held_out=half, generator=generator) for half in (False, True))
        return train, held_out
    prompts = _some(load_prompts(config.prompts), 4 * config.n_prompts, generator)
    if {prompt.plural for prompt in prompts} != {False, True}:
        raise ValueError(f"{config.prompts} has prompts of one number only. Give heads of both numbers.")
    return prompts[::2], prompts[1::2]


def _some(prompts: Sequence[AgreementPrompt], at_most: int, generator: torch.Generator) -> list[AgreementPrompt]:
    """Prompts in random order, each text once: files list one for every verb."""
    once = list({prompt.text: prompt for prompt in prompts}.values())
    return [once[index] for index in torch.randperm(len(once), generator=generator)[:at_most].tolist()]


def _find(
    config: AgreementConfig,
    spec: str,
    train: list[AgreementPrompt],
    held_out: list[AgreementPrompt],
    transfer: dict[str, list[AgreementPrompt]],
) -> _Found:
    settings = language_model(spec) if spec in LANGUAGE_MODELS else None
    model = ace.load_model(spec) if settings is None else settings.load()
    batch_size = config.batch_size or (settings.batch_size if settings else 64)
    options = {"batch_size": batch_size, "progress": config.progress}
    verbs = answer_sets(model, leave_out_split=True)
    target = verbs.margin(model)
    whole, judge = prompt_samples(model, train), prompt_samples(model, held_out)

    hook_points = [f"blocks.{layer}.hook_resid_post" for layer in range(model.cfg.n_layers)]
    folds = frame_folds(train, N_FOLDS)
    cores, choosing = ace.crossfit_layers(model, whole, target, hook_points, folds, **options)
    layer = _best_layer(choosing)
    sweep = ace.sweep_layers(model, cores, judge, target, **options)
    core = cores[hook_points[layer]]
    verdict = ace.validate(model, core, judge, target, **options)
    controls = ace.compare_with_controls(
        model,
        core,
        judge[:CONTROL_PROMPTS],
        target,
        fit=whole[:CONTROL_PROMPTS],
        n_draws=N_DRAWS,
        n_steps=50,
        generator=torch.Generator().manual_seed(config.seed),
        **options,
    )
    coordinates, margins = _knob(model, core, judge, target, batch_size)
    slope, offset = _line(*_knob(model, core, whole, target, batch_size))
    residual = margins - (slope * coordinates + offset)
    strengths = ace.smallest_flips(model, core, judge, target, batch_size=batch_size)
    base, keep, remove, flip = verdict.baseline, verdict.keep[0], verdict.remove[0], verdict.flip[0]
    result = ModelResult(
        name=_name(spec),
        n_layers=model.cfg.n_layers,
        layer=layer,
        left_out=verbs.left_out,
        base_auc=base.value,
        base_interval=(base.low, base.high),
        keep_auc=keep.value,
        keep_interval=(keep.low, keep.high),
        remove_auc=remove.value,
        remove_interval=(remove.low, remove.high),
        flip_auc=flip.value,
        flip_interval=(flip.low, flip.high),
        knob_r2=1 - float(residual.square().mean() / margins.var(correction=0)),
        turned=float((~strengths.isnan()).double().mean()),
        median_strength=float(strengths.nanmedian()),
        outside_kl={name: values[0] for name, values in verdict.outside_kl.items()},
        sweep=[_sweep_row(sweep, index) for index in range(len(hook_points))],
        controls=controls,
        generation=_generate(
            model, core, target, held_out[: 2 * config.n_continued], judge.prepend_bos, config, batch_size
        ),
        transfer=[_transferred(model, core, target, name, prompts, batch_size) for name, prompts in transfer.items()],
        coordinates=coordinates.tolist(),
        margins=margins.tolist(),
        plural=[prompt.plural for prompt in held_out],
    )
    return _Found(result, model, core, target, whole, judge, batch_size)


def _name(spec: str) -> str:
    """What a model is called in reports: its own name rather than where it lies."""
    path = Path(spec)
    return path.stem if path.suffix == ".gguf" else path.name if path.exists() else spec


def _best_layer(sweep: ace.LayerSweep) -> int:
    """Where keeping, flipping and removing are nearest to what they are for a core: 1, 0 and chance."""
    scores = zip(sweep.keep, sweep.remove, sweep.flip, strict=True)
    merits = [keep.value - flip.value - abs(remove.value - 0.5) for keep, remove, flip in scores]
    return merits.index(max(merits))


def _sweep_row(sweep: ace.LayerSweep, layer: int) -> SweepRow:
    fields: dict[str, Any] = {}
    for name in ("keep", "remove", "flip"):
        estimate = getattr(sweep, name)[layer]
        fields |= {name: estimate.value, f"{name}_interval": (estimate.low, estimate.high)}
    return SweepRow(layer=layer, **fields)


def _knob(
    model: Any, core: ace.Core, samples: ace.Samples, target: ace.LogitMargin, batch_size: int
) -> tuple[Tensor, Tensor]:
    """Core coordinate and margin of each sample, without intervention."""
    coordinates, margins = (
        torch.empty(len(samples), dtype=torch.float64),
        torch.empty(len(samples), dtype=torch.float64),
    )
    for paused in ace.paused_passes(model, samples, core.hook_point, batch_size=batch_size):
        coordinates[paused.index] = core.coordinates(paused.activations)[:, 0].double().cpu()
        margins[paused.index] = target(paused.logits.float())[:, 0].double().cpu()
    return coordinates, margins


def _line(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and offset of the least-squares line."""
    slope = ((x - x.mean()) * (y - y.mean())).mean() / x.var(correction=0)
    return slope, y.mean() - slope * x.mean()


def _transferred(
    model: Any, core: ace.Core, target: ace.LogitMargin, name: str, prompts: list[AgreementPrompt], batch_size: int
) -> TransferRow:
    verdict = ace.validate(model, core, prompt_samples(model, prompts), target, batch_size=batch_size)
    return TransferRow(name, len(prompts), verdict.baseline, verdict.keep[0], verdict.remove[0], verdict.flip[0])


@dataclass(frozen=True)
class _StrongestMargin:
    """The margin between the strongest verb of each number, which are the ones that greedy decoding may write."""

    margin: ace.LogitMargin

    @property
    def tokens(self) -> list[int]:
        return self.margin.tokens

    def __call__(self, logits: Tensor) -> Tensor:
        plural, singular = (logits[:, tokens].amax(1) for tokens in (self.margin.positive, self.margin.negative))
        return (plural - singular).unsqueeze(1)


def _generate(
    model: Any,
    core: ace.Core,
    target: ace.LogitMargin,
    prompts: list[AgreementPrompt],
    prepend_bos: bool | None,
    config: AgreementConfig,
    batch_size: int,
) -> Generation:
    plain = _continued(model, [prompt.text for prompt in prompts], prepend_bos, config)
    pairs = zip(prompts, plain, strict=True)
    right = [pair for pair in pairs if _begins_with_copula(pair[1]) and _number(pair[1]) == pair[0].plural]
    if not right:
        return Generation(len(prompts), 0)
    texts, clean = [prompt.text for prompt, _ in right], [text for _, text in right]
    with ace.SignFlipSteerer(core, positions="last").attach(model):
        flipped = _continued(model, texts, prepend_bos, config)
    adaptive = ace.generate_steered(
        model,
        texts,
        ace.adaptive_flip(model, core, _StrongestMargin(target), beyond=BEYOND),
        max_new_tokens=config.n_new_tokens,
        batch_size=batch_size,
    )

    def steered(texts_steered: list[str]) -> Steered:
        n_changed = sum(
            _begins_with_copula(text) and _number(text) != prompt.plural
            for (prompt, _), text in zip(right, texts_steered, strict=True)
        )
        wilson = binomtest(n_changed, len(right)).proportion_ci(method="wilson")
        return Steered(
            n_changed=n_changed,
            changed=n_changed / len(right),
            interval=(float(wilson.low), float(wilson.high)),
            perplexity=_perplexity(model, texts, texts_steered),
        )

    return Generation(
        n_prompts=len(prompts),
        n_right=len(right),
        perplexity=_perplexity(model, texts, clean),
        flip=steered(flipped),
        adaptive=steered(adaptive),
        examples=tuple(itertools.starmap(Continuation, zip(texts, clean, flipped, adaptive, strict=True)))[:6],
    )


def _continued(model: Any, texts: list[str], prepend_bos: bool | None, config: AgreementConfig) -> list[str]:
    """Greedy continuations; prompts of one length share a batch, so that nothing is padded."""
    rows = [model.to_tokens(text, prepend_bos=prepend_bos)[0] for text in texts]
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        by_length[len(row)].append(index)
    found = [""] * len(texts)
    for length, indices in tqdm(by_length.items(), "Continuing", leave=False, disable=not config.progress):
        tokens = model.generate(
            torch.stack([rows[index] for index in indices]),
            max_new_tokens=config.n_new_tokens,
            do_sample=False,
            return_type="tokens",
            verbose=False,
        )
        for index, row in zip(indices, tokens[:, length:].tolist(), strict=True):
            found[index] = model.tokenizer.decode(row, skip_special_tokens=True)
    return found


def _number(text: str) -> bool | None:
    """Whether the first copula of a text is plural; None without one."""
    match = re.search(r"\b(is|are|was|were)\b", text)
    return None if match is None else COPULAS[match[1]]


def _begins_with_copula(text: str) -> bool:
    return re.match(r"\s*(is|are|was|were)\b", text) is not None


def _marked(text: str) -> str:
    """The text on one line, with its copulas between asterisks."""
    return re.sub(r"\b(is|are|was|were)\b", r"*\1*", " ".join(text.split()))


def _perplexity(model: Any, texts: list[str], continuations: list[str]) -> float | None:
    """Of the continuations, given the prompts; None if all are empty."""
    pairs = [(text, text + more) for text, more in zip(texts, continuations, strict=True) if more.strip()]
    if not pairs:
        return None
    samples = ace.Samples.from_text(model, [whole for _, whole in pairs])
    starts = torch.tensor([model.to_tokens(text, prepend_bos=samples.prepend_bos).shape[1] for text, _ in pairs])
    inside = samples.position >= starts[samples.sequence] - 1
    return ace.text_perplexity(model, samples[inside.nonzero()[:, 0]])


def _compare(first: _Found, second: _Found, seed: int) -> PairResult:
    generator = torch.Generator().manual_seed(seed)
    coordinates = [torch.tensor(each.result.coordinates, dtype=torch.float64) for each in (first, second)]
    correlation = ace.spearman(*coordinates, generator=generator)
    plural = torch.tensor(first.result.plural)
    within = [
        ace.spearman(*(each[mask] for each in coordinates), n_resamples=1, generator=generator).rho.value
        for mask in (plural, ~plural)
    ]
    activations = torch.empty(len(first.held_out), first.core.d_model, dtype=torch.float64)
    for paused in ace.paused_passes(first.model, first.held_out, first.core.hook_point, batch_size=first.batch_size):
        activations[paused.index] = paused.activations.double().cpu()
    axes = torch.randn(N_DRAWS, first.core.d_model, generator=generator, dtype=torch.float64)
    random = [
        ace.spearman(activations @ axis, coordinates[1], n_resamples=1, generator=generator).rho.value for axis in axes
    ]
    transplants = tuple(
        ace.transplant(
            donor.model,
            donor.core,
            receiver.model,
            receiver.core,
            receiver.held_out,
            receiver.target,
            fit=receiver.train,
            donor_samples=donor.held_out,
            donor_fit=donor.train,
            generator=generator,
            batch_size=receiver.batch_size,
        )
        for donor, receiver in ((first, second), (second, first))
    )
    return PairResult(
        models=(first.result.name, second.result.name),
        spearman=correlation.rho.value,
        interval=(correlation.rho.low, correlation.rho.high),
        p=correlation.p,
        within_number=sum(within) / 2,
        random_spearman=max(abs(value) for value in random),
        transplants=(transplants[0], transplants[1]),
    )
