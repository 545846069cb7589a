"""A Markov chain on a ring, learnt by independent transformers: one core, found three times.

A state advances by one with probability 1/4 and stays otherwise. The next state depends on nothing but the
current one, so the best possible model predicts "stay" and is right three times in four. What a model needs for
that are the functions of the current state, a space of as many dimensions as states; softmax does not see the
constant one, which leaves a core of three dimensions. In it one step of time acts as the chain's transition
matrix does, with eigenvalues 0.75 + 0.25i, 0.75 - 0.25i and 0.5.
"""

import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm

import ace_lens as ace
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
MAX_RANK = 8


@dataclass(frozen=True)
class Recipe:
    """How the models are trained: AdamW without weight decay, batches of 64 sequences."""

    epochs: int
    learning_rate: float


RECIPES = {"quick": Recipe(epochs=4, learning_rate=1e-3), "paper": Recipe(epochs=40, learning_rate=1e-4)}


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
    """What was found in one model. Complex numbers are [real, imaginary]."""

    seed: int
    accuracy: float
    accuracy_interval: tuple[float, float]
    rank: int
    keep: float
    keep_interval: tuple[float, float]
    remove: float
    remove_interval: tuple[float, float]
    eigenvalues: list[list[float]]
    eigenvalue_error: float
    r2: float
    r2_over_oracle: float


@dataclass(frozen=True)
class PairResult:
    """How alike two models are."""

    models: tuple[int, int]
    weight_cosine: float
    weight_cosine_without_gains: float
    overlap: float
    cca: list[float]


@dataclass(frozen=True)
class Truth:
    """What is known of the chain itself."""

    eigenvalues: list[list[float]]
    accuracy: float
    chance: float
    oracle_r2: float


@dataclass(frozen=True)
class MarkovResults:
    """The experiment's results, as they stand in results.json."""

    preset: str
    normalization: str
    truth: Truth
    models: list[ModelResult]
    pairs: list[PairResult]

    def save(self, path: Path) -> None:
        """Write results.json."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def __str__(self) -> str:
        truth = self.truth
        lines = [
            f"Markov chain on a ring of {N_STATES} states ({self.preset} preset). Best possible accuracy "
            f"{truth.accuracy:.3f}, chance {truth.chance:.3f}.",
            f"Core at {HOOK_POINT}; scores on held-out sequences, 95% intervals.",
            "",
            f"{'model':>6}  {'accuracy':<21}  {'rank':>4}  {'keep':<21}  {'remove':<21}  {'eigenvalues':<29}  "
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
                f"{model.seed:>6}  {scores[0]:<21}  {model.rank:>4}  {scores[1]:<21}  {scores[2]:<21}  "
                f"{_spectrum(model.eigenvalues):<29}  {model.eigenvalue_error:>5.3f}  {model.r2_over_oracle:>9.3f}"
            )
        lines += [
            f"{'truth':>6}  {truth.accuracy:<21.3f}  {N_STATES - 1:>4}  {truth.accuracy:<21.3f}  "
            f"{truth.chance:<21.3f}  {_spectrum(truth.eigenvalues):<29}  {0:>5.3f}  {1:>9.3f}",
            "",
            f"{'pair':>6}  {'weight cosine':>13}  {'without gains':>13}  {'overlap':>7}  canonical correlations",
        ]
        for pair in self.pairs:
            lines.append(
                f"{pair.models[0]:>3}, {pair.models[1]}  {_unsigned_zero(pair.weight_cosine):>13.3f}  "
                f"{_unsigned_zero(pair.weight_cosine_without_gains):>13.3f}  {pair.overlap:>7.3f}  "
                f"{', '.join(f'{value:.3f}' for value in pair.cca)}"
            )
        lines += [
            "",
            "Overlap of two random subspaces of rank 3: "
            f"{(N_STATES - 1) / D_MODEL:.3f}. R2/oracle can pass 1: besides the current state,",
            "coordinates hold some memory of earlier ones, which persists.",
        ]
        if self.normalization == "pre":
            lines += ["Gains of LayerNorm start at one in every model; they alone lift the weight cosine above zero."]
        return "\n".join(lines)


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
    # Importing TransformerLens takes seconds, which `ace-lens --help` should not.
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    bridge: Any = TransformerBridge  # boot_native is put on the class at run time
    return bridge.boot_native(
        TransformerBridgeConfig(
            n_layers=1,
            d_model=D_MODEL,
            n_heads=4,
            d_head=D_MODEL // 4,
            d_mlp=4 * D_MODEL,
            d_vocab=N_STATES,
            n_ctx=LENGTH,
            act_fn="relu",
            normalization_type={"none": None, "pre": "LN"}[normalization],
            seed=seed,
            device="cpu",
        )
    )


def train_model(model: Any, chains: Tensor, recipe: Recipe, generator: torch.Generator, *, progress: bool) -> None:
    """Train a model to predict the next state of the chains, in batches drawn by the generator."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
    epochs = tqdm(range(recipe.epochs), "Training", disable=not progress, unit="epoch")
    loss = torch.tensor(0.0)
    for _ in epochs:
        for batch in torch.randperm(len(chains), generator=generator).split(BATCH_SIZE):
            states = chains[batch]
            loss = cross_entropy(model(states[:, :-1]).flatten(0, 1), states[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        epochs.set_postfix(loss=f"{loss.item():.3f}")
    model.eval()


def run_markov(config: MarkovConfig) -> tuple[MarkovResults, list[ace.Core]]:
    """Train the models, and find, prove, read and compare their cores.

    A core is extracted on training sequences. Its rank is the smallest that keeps 99% of what the model gained
    in cross-entropy over chance, on a third of the test sequences, which also fit the operator and the canonical
    directions; every reported score is taken on the other two thirds.
    """
    chains = sample_chains(N_SEQUENCES, torch.Generator().manual_seed(1))
    test = sample_chains(N_SEQUENCES, torch.Generator().manual_seed(2))
    select, judge = (_samples(part) for part in (test[:N_SELECT], test[N_SELECT:]))
    target = ace.CentredLogits()
    truth = torch.linalg.eigvals(transition_matrix())
    truth = truth[(truth - 1).abs() > 1e-6]
    oracle = ace.oracle_r2(transition_matrix())

    models, cores, results = [], [], []
    coordinates: list[tuple[Tensor, Tensor]] = []
    for seed in config.seeds:
        model = build_model(seed, config.normalization)
        train_model(
            model,
            chains,
            RECIPES[config.preset],
            torch.Generator().manual_seed(seed),
            progress=config.progress,
        )
        full = ace.extract_core(model, _samples(chains[:EXTRACTION_SEQUENCES]), target, HOOK_POINT)
        ranks = range(1, min(MAX_RANK, full.rank) + 1)
        selection = ace.validate(model, full, select, target, ace.CROSS_ENTROPY, ranks=ranks)
        rank = selection.r_suf or ranks[-1]
        core = full[:rank]
        proof = ace.validate(model, core, judge, target)
        trajectories = _trajectories(model, core, select), _trajectories(model, core, judge)
        operator = ace.fit_operator(*trajectories)
        matched, errors = ace.match_eigenvalues(operator.eigenvalues, truth)
        results.append(
            ModelResult(
                seed=seed,
                accuracy=proof.baseline.value,
                accuracy_interval=(proof.baseline.low, proof.baseline.high),
                rank=rank,
                keep=proof.keep[0].value,
                keep_interval=(proof.keep[0].low, proof.keep[0].high),
                remove=proof.remove[0].value,
                remove_interval=(proof.remove[0].low, proof.remove[0].high),
                eigenvalues=_pairs(matched),
                eigenvalue_error=float(errors.max()),
                r2=operator.r2,
                r2_over_oracle=operator.r2 / oracle,
            )
        )
        models.append(model)
        cores.append(core)
        coordinates.append(trajectories)

    pairs = []
    for a, b in itertools.combinations(range(len(models)), 2):
        weights = [dict(model.named_parameters()) for model in (models[a], models[b])]
        without_gains = [{name: p for name, p in part.items() if not _is_gain(name)} for part in weights]
        flat = [part.flatten(0, 1) for part in (coordinates[a] + coordinates[b])]
        pairs.append(
            PairResult(
                models=(config.seeds[a], config.seeds[b]),
                weight_cosine=ace.weight_cosine(*weights),
                weight_cosine_without_gains=ace.weight_cosine(*without_gains),
                overlap=ace.overlap(cores[a], cores[b]),
                cca=ace.canonical_correlations(flat[0], flat[2], flat[1], flat[3]).tolist(),
            )
        )
    known = Truth(_pairs(truth), 1 - ADVANCE, 1 / N_STATES, oracle)
    return MarkovResults(config.preset, config.normalization, known, results, pairs), cores


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


def _pairs(values: Tensor) -> list[list[float]]:
    return [[value.real, value.imag] for value in values.tolist()]


def _unsigned_zero(value: float) -> float:
    """The value to three digits, without the sign of a zero."""
    return round(value, 3) + 0.0


def _spectrum(pairs: list[list[float]]) -> str:
    parts = []
    for real, imaginary in pairs:
        if abs(imaginary) < 1e-9:
            parts.append(f"{real:.3f}")
        elif imaginary > 0:
            parts.append(f"{real:.3f} ± {imaginary:.3f}i")
    return ", ".join(parts)
