"""The command line: each experiment is a subcommand, with the fields of its configuration as options."""

import os
import time
from collections.abc import Sequence

import torch
import tyro

from ace_lens.experiments.agreement import AgreementConfig, run_agreement
from ace_lens.experiments.figures import plot_agreement, plot_markov, plot_modular_addition
from ace_lens.experiments.markov import MarkovConfig, run_markov
from ace_lens.experiments.modular_addition import ModularAdditionConfig, run_modular_addition
from ace_lens.loading import LoadingError


def markov(config: MarkovConfig) -> None:
    """Run the Markov experiment; print its table, write results, cores and figure."""
    print(
        f"Training {len(config.seeds)} transformers on a Markov chain ({config.preset} preset) ...",
        flush=True,
    )
    start = time.perf_counter()
    config.out.mkdir(parents=True, exist_ok=True)
    results, cores = run_markov(config)
    results.save(config.out / "results.json")
    for model, core in zip(results.models, cores, strict=True):
        core.save(config.out / f"core-seed{model.seed}.safetensors")
    plot_markov(results).savefig(config.out / "markov.png", dpi=200)
    print(f"\n{results}\n")
    print(
        f"Took {time.perf_counter() - start:.0f} s. Written to {config.out}: results.json, markov.png and "
        f"{len(cores)} cores (core-seed*.safetensors)."
    )


def modular_addition(config: ModularAdditionConfig) -> None:
    """Run the modular addition experiment; print its table, write results, figure and checkpoints."""
    config = config.resolved()
    print(
        f"Training a transformer on addition modulo {config.period} for {config.epochs} epochs ({config.preset} "
        "preset) ...",
        flush=True,
    )
    start = time.perf_counter()
    results = run_modular_addition(config)
    results.save(config.out / "results.json")
    plot_modular_addition(results).savefig(config.out / "modular-addition.png", dpi=200)
    print(f"\n{results}\n")
    print(
        f"Took {time.perf_counter() - start:.0f} s. Written to {config.out}: results.json, modular-addition.png and "
        "checkpoints."
    )


def agreement(config: AgreementConfig) -> None:
    """Run the agreement experiment; print its tables, write results, cores and figure."""
    print(f"Reading {', '.join(config.model) or 'no model'} ...", flush=True)
    start = time.perf_counter()
    results = run_agreement(config)
    plot_agreement(results).savefig(config.out / "agreement.png", dpi=200)
    print(f"\n{results}\n")
    print(
        f"Took {time.perf_counter() - start:.0f} s. Written to {config.out}: results.json, agreement.png and "
        f"{len(results.models)} cores (core-*.safetensors)."
    )


RUN = {MarkovConfig: markov, ModularAdditionConfig: modular_addition, AgreementConfig: agreement}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; `ace-lens --help` describes it."""
    config = tyro.extras.subcommand_cli_from_dict(
        {"markov": MarkovConfig, "modular-addition": ModularAdditionConfig, "agreement": AgreementConfig},
        prog="ace-lens",
        description="Find, prove and read algorithmic cores of transformers.",
        args=arguments,
    )
    if not isinstance(config, AgreementConfig):
        # Toy models do not come from a hub, and a machine without a network should not wait for one.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        # On any number of cores a seed then gives the same run: how sums are split among threads rounds differently.
        torch.set_num_threads(1)
    try:
        RUN[type(config)](config)
    except (ValueError, LoadingError, FileNotFoundError) as error:
        raise SystemExit(f"ace-lens: {error}") from error
