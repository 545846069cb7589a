"""A Markov chain on a ring, learnt by independent transformers: one core, found three times.

A state advances by one with probability 1/4 and stays otherwise. The next state depends on nothing but the
current one, so the best possible model predicts "stay" and is right three times in four. What a model needs for
that are the functions of the current state, a space of as many dimensions as states; softmax does not see the
constant one, which leaves a core of three dimensions. In it one step of time acts as the chain's transition
matrix does, with eigenvalues 0.75 + 0.25i, 0.75 - 0.25i and 0.5.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

import ace_lens as ace
from ace_lens.experiments.toys import build_native
from ace_lens.experiments.training import Recipe, train
from ace_lens.reports import Report
from ace_lens.shapes import typed

N_STATES = 4
D_MODEL = 64
ADVANCE = 0.25
LENGTH = 32
HOOK_POINT = "blocks.0.hook_resid_post"
N_SEQUENCES = 3000
N_SELECT = 1000
BATCH_SIZE = 64
EXTRACTION_SEQUENCES = 500
CONTROL_SEQUENCES = 300
MAX_RANK = 8
TARGET = ace.CentredLogits()


PRESETS = {"quick": {"epochs": 4, "learning_rate": 1e-3}, "paper": {"epochs": 40, "learning_rate": 1e-4}}
"""The quick preset trains shorter, at a higher learning rate."""


@dataclass(frozen=True)
class MarkovConfig:
    """Find the core of a Markov chain in independently trained transformers."""

    preset: Literal["quick", "paper"] = "quick"
    """quick trains for 4 epochs at a high learning rate, paper for 40 epochs as the paper does."""
    out: Path = Path("ace-lens-markov")
    """Folder for results.json, the cores and the figure."""
    normalization: Literal["none", "pre"] = "none"
    """Blocks without normalisation, or with LayerNorm before each part. LayerNorm divides by the length of the
    whole residual stream, so that a core of three dimensions is then only nearly sufficient."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One model is trained for each seed."""
    progress: bool = True
    """Show progress bars."""


@dataclass(frozen=True)
class ModelResult:
    """What was found in one model. Complex numbers are [real, imaginary].

    Intervals are 95% bootstrap intervals over sequences; eigenvalues are in the order of the chain's own.
    """

    seed: int
    accuracy: float
    accuracy_interval: tuple[float, float]
    rank: int
    keep: float
    keep_interval: tuple[float, float]
    remove: float
    remove_interval: tuple[float, float]
    eigenvalues: list[tuple[float, float]]
    eigenvalue_interval: list[tuple[tuple[float, float], tuple[float, float]]]
    eigenvalue_error: float
    shuffled_time_p: float
    r2: float
    r2_over_oracle: float
    controls: ace.Controls


@dataclass(frozen=True)
class PairResult:
    """How alike two models are.

    `transplants` are of the first model's core into the second, and of the second's into the first.
    """

    models: tuple[int, int]
    weight_cosine: float
    weight_cosine_without_gains: float
    overlap: float
    cca: list[float]
    cca_p: list[float]
    transplants: tuple[ace.Transplant, ace.Transplant]


@dataclass(frozen=True)
class Truth:
    """What is known of the chain itself."""

    eigenvalues: list[tuple[float, float]]
    accuracy: float
    chance: float
    oracle_r2: float


@dataclass(frozen=True)
class MarkovResults(Report):
    """The experiment's results, as they stand in results.json."""

    preset: str
    normalization: str
    truth: Truth
    models: list[ModelResult]
    pairs: list[PairResult]

    def __str__(self) -> str:
        truth = self.truth
        lines = [
            f"Markov chain on a ring of {N_STATES} states ({self.preset} preset). Best possible accuracy "
            f"{truth.accuracy:.3f}, chance {truth.chance:.3f}.",
            f"Core at {HOOK_POINT}; scores on held-out sequences, 95% intervals.",
            "",
            f"{'model':>5}  {'accuracy':<20}  {'rank':>4}  {'keep':<20}  {'remove':<20}  {'eigenvalues':<21}  "
            f"{'error':>5}  {'R2/oracle':>9}",
        ]
        for model in self.models:
            scores = [
                f"{value:.3f} [{low:.3f}, {high:.3f}]"
                for value, (low, high) in (
                    (model.accuracy, model.accuracy_interval),
                    (model.keep, model.keep_interval),
                    (model.remove, model.remove_interval),
                )
            ]
            lines.append(
                f"{model.seed:>5}  {scores[0]:<20}  {model.rank:>4}  {scores[1]:<20}  {scores[2]:<20}  "
                f"{_spectrum(model.eigenvalues):<21}  {model.eigenvalue_error:>5.3f}  {model.r2_over_oracle:>9.3f}"
            )
        lines += [
            f"{'truth':>5}  {truth.accuracy:<20.3f}  {N_STATES - 1:>4}  {truth.accuracy:<20.3f}  "
            f"{truth.chance:<20.3f}  {_spectrum(truth.eigenvalues):<21}  {0:>5.3f}  {1:>9.3f}",
            "",
            "Controls of the same rank, accuracy over all models:",
            f"{'':>5}  {'subspace':<22}  {'keep':<14}  {'remove':<14}",
        ]
        for rows in zip(*(model.controls.rows for model in self.models), strict=True):
            lines.append(f"{'':>5}  {rows[0].name:<22}  {_range(rows, 'keep'):<14}  {_range(rows, 'remove')}")
        if self.pairs:
            lines += [
                "",
                f"{'pair':>5}  {'weight cosine':>13}  {'overlap':>7}  {'canonical correlations':<22}  "
                f"{'transplant':<14}  {'shuffled':<14}  {'random donor':<14}",
            ]
        for pair in self.pairs:
            cca = ", ".join(f"{value:.3f}" for value in pair.cca)
            cells = (_range(pair.transplants, name) for name in ("transplanted", "shuffled", "from_random"))
            lines.append(
                f"{pair.models[0]:>2}, {pair.models[1]}  {_unsigned_zero(pair.weight_cosine):>13.3f}  "
                f"{pair.overlap:>7.3f}  {cca:<22}  {'  '.join(f'{cell:<14}' for cell in cells)}".rstrip()
            )
        lines += [
            "",
            "Transplant: accuracy of a model whose core coordinates are another's, mapped linearly (both directions).",
            f"Two random subspaces of rank {N_STATES - 1} overlap by {(N_STATES - 1) / D_MODEL:.3f}.",
            "R2/oracle passes 1 where coordinates also hold some memory of earlier states, which persists.",
            "A random subspace passes on a faint image of the core: keeping it beats chance, removing it does nothing.",
        ]
        if self.normalization == "pre" and self.pairs:
            without = ", ".join(f"{_unsigned_zero(pair.weight_cosine_without_gains):.3f}" for pair in self.pairs)
            lines += [f"Gains of LayerNorm start at one in every model. Without them the weight cosines are {without}."]
        return "\n".join(line.rstrip() for line in lines)


@typed
def transition_matrix() -> Float[Tensor, "state state"]:
    """Row i holds the distribution of the state after i."""
    stay = torch.eye(N_STATES, dtype=torch.float64)
    return (1 - ADVANCE) * stay + ADVANCE * stay.roll(1, dims=1)


@typed
def sample_chains(n_sequences: int, generator: torch.Generator, length: int = LENGTH) -> Int[Tensor, "sequence time"]:
    """Sequences of states, each from a uniformly drawn first state."""
    first = torch.randint(N_STATES, (n_sequences, 1), generator=generator)
    advances = torch.rand(n_sequences, length - 1, generator=generator) < ADVANCE
    return torch.cat([first, first + advances.cumsum(1)], dim=1) % N_STATES


def build_model(seed: int, normalization: Literal["none", "pre"] = "none") -> Any:
    """A one-layer transformer (a native `TransformerBridge`) with freshly drawn weights."""
    return build_native(
        n_layers=1,
        d_model=D_MODEL,
        n_heads=4,
        d_mlp=4 * D_MODEL,
        d_vocab=N_STATES,
        n_ctx=LENGTH,
        seed=seed,
        normalization=normalization,
    )


def run_markov(config: MarkovConfig) -> tuple[MarkovResults, list[ace.Core]]:
    """Train the models, and find, prove, read and compare their cores.

    A core is extracted on training sequences. Its rank is the smallest that keeps 99% of what the model gained in
    cross-entropy over chance, on a third of the test sequences, which also fit the operator, the controls and the maps
    between models; every reported score is taken on the other two thirds.
    """
    chains = sample_chains(N_SEQUENCES, torch.Generator().manual_seed(1))
    test = sample_chains(N_SEQUENCES, torch.Generator().manual_seed(2))
    extraction = _samples(chains[:EXTRACTION_SEQUENCES])
    select, judge = _samples(test[:N_SELECT]), _samples(test[N_SELECT:])
    truth = torch.linalg.eigvals(transition_matrix())
    truth = truth[(truth - 1).abs() > 1e-6]
    generator = torch.Generator().manual_seed(3)

    models, cores, results = [], [], []
    for seed in config.seeds:
        model = build_model(seed, config.normalization)
        recipe = Recipe(**PRESETS[config.preset], weight_decay=0.0, batch_size=BATCH_SIZE, seed=seed)
        train(model, chains[:, :-1], chains[:, 1:], recipe, progress=config.progress)
        full = ace.extract_core(model, extraction, TARGET, HOOK_POINT)
        ranks = range(1, min(MAX_RANK, full.rank) + 1)
        selection = ace.validate(model, full, select, TARGET, ace.CROSS_ENTROPY, ranks=ranks)
        core = full[: selection.r_suf or ranks[-1]]
        models.append(model)
        cores.append(core)
        results.append(_model_result(seed, model, core, select, judge, truth, generator, config.progress))
    pairs = [
        _pair_result(
            (config.seeds[a], config.seeds[b]), [models[a], models[b]], [cores[a], cores[b]], select, judge, generator
        )
        for a, b in itertools.combinations(range(len(models)), 2)
    ]
    known = Truth(_pairs(truth), 1 - ADVANCE, 1 / N_STATES, ace.oracle_r2(transition_matrix()))
    return MarkovResults(config.preset, config.normalization, known, results, pairs), cores


def _model_result(
    seed: int,
    model: Any,
    core: ace.Core,
    select: ace.Samples,
    judge: ace.Samples,
    truth: Tensor,
    generator: torch.Generator,
    progress: bool,
) -> ModelResult:
    proof = ace.validate(model, core, judge, TARGET, progress=progress)
    chosen, held_out = (_trajectories(model, core, samples) for samples in (select, judge))
    controls = ace.compare_with_controls(
        model,
        core,
        judge[: CONTROL_SEQUENCES * (LENGTH - 1)],
        TARGET,
        fit=select[: CONTROL_SEQUENCES * (LENGTH - 1)],
        n_steps=100,
        generator=generator,
        progress=progress,
    )
    keep, remove = proof.keep[0], proof.remove[0]
    return ModelResult(
        seed=seed,
        accuracy=proof.baseline.value,
        accuracy_interval=(proof.baseline.low, proof.baseline.high),
        rank=core.rank,
        keep=keep.value,
        keep_interval=(keep.low, keep.high),
        remove=remove.value,
        remove_interval=(remove.low, remove.high),
        **_dynamics(chosen, held_out, truth, generator),
        controls=controls,
    )


def _dynamics(chosen: Tensor, held_out: Tensor, truth: Tensor, generator: torch.Generator) -> dict[str, Any]:
    """The fields of `ModelResult` on the operator inside the core."""
    operator = ace.fit_operator(chosen, held_out)
    fields = {"r2": operator.r2, "r2_over_oracle": operator.r2 / ace.oracle_r2(transition_matrix())}
    if len(operator.eigenvalues) < len(truth):
        # Too small a core cannot step like the chain. That is a result of this model, and no reason to lose the others.
        unknown = [(math.nan, math.nan)] * len(truth)
        return fields | {
            "eigenvalues": unknown,
            "eigenvalue_interval": list(zip(unknown, unknown, strict=True)),
            "eigenvalue_error": math.inf,
            "shuffled_time_p": 1.0,
        }
    matched, errors = ace.match_eigenvalues(operator.eigenvalues, truth)
    low, high = ace.eigenvalue_intervals(chosen, generator=generator)
    order = [operator.eigenvalues.tolist().index(value) for value in matched.tolist()]
    return fields | {
        "eigenvalues": _pairs(matched),
        "eigenvalue_interval": list(zip(_pairs(low[order]), _pairs(high[order]), strict=True)),
        "eigenvalue_error": float(errors.max()),
        "shuffled_time_p": ace.spectrum_p_value(chosen, truth, n_permutations=99, generator=generator),
    }


def _pair_result(
    seeds: tuple[int, int],
    models: list[Any],
    cores: list[ace.Core],
    select: ace.Samples,
    judge: ace.Samples,
    generator: torch.Generator,
) -> PairResult:
    weights = [dict(model.named_parameters()) for model in models]
    without_gains = [{name: p for name, p in part.items() if not _is_gain(name)} for part in weights]
    # Fitted on one part of the sequences, in each model, then read on the other.
    fit, held_out = (
        [_trajectories(model, core, samples).flatten(0, 1) for model, core in zip(models, cores, strict=True)]
        for samples in (select, judge)
    )
    first, second = (
        ace.transplant(models[a], cores[a], models[b], cores[b], judge, TARGET, fit=select, generator=generator)
        for a, b in ((0, 1), (1, 0))
    )
    return PairResult(
        models=seeds,
        weight_cosine=ace.weight_cosine(*weights),
        weight_cosine_without_gains=ace.weight_cosine(*without_gains),
        overlap=ace.overlap(*cores),
        cca=ace.canonical_correlations(*fit, *held_out).tolist(),
        cca_p=ace.canonical_correlation_p_values(
            *fit, *held_out, sequence_length=LENGTH - 1, n_permutations=99, generator=generator
        ).tolist(),
        transplants=(first, second),
    )


def _samples(chains: Tensor) -> ace.Samples:
    return ace.Samples.from_tokens(chains[:, :-1], "all", labels=chains[:, 1:])


def _trajectories(model: Any, core: ace.Core, samples: ace.Samples) -> Tensor:
    """Core coordinates along each sequence, `[sequence, time, rank]`."""
    capture = ace.CoreHook(core.hook_point)
    with torch.no_grad():
        model.run_with_hooks(samples.tokens, fwd_hooks=capture.fwd_hooks())
    return core.coordinates(capture.activations[core.hook_point])


def _is_gain(parameter: str) -> bool:
    return "ln" in parameter and parameter.endswith("weight")


def _pairs(values: Tensor) -> list[tuple[float, float]]:
    return [(value.real, value.imag) for value in values.tolist()]


def _range(reports: Sequence[Any], name: str) -> str:
    """From the lowest to the highest value of an estimate among reports."""
    values = [getattr(report, name).value for report in reports]
    return f"{min(values):.3f} to {max(values):.3f}"


def _unsigned_zero(value: float) -> float:
    """The value to three digits, without the sign of a zero."""
    return round(value, 3) + 0.0


def _spectrum(pairs: list[tuple[float, float]]) -> str:
    parts = []
    for real, imaginary in pairs:
        if math.isnan(real):
            return "core too small"
        if abs(imaginary) < 1e-9:
            parts.append(f"{real:.3f}")
        elif imaginary > 0:
            parts.append(f"{real:.3f} ± {imaginary:.3f}i")
    return ", ".join(parts)
