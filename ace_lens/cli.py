"""The command line: each experiment is a subcommand, with the fields of its configuration as options."""

import os
import time
from collections.abc import Sequence

import torch
import tyro

from ace_lens.experiments.figures import plot_markov
from ace_lens.experiments.markov import MarkovConfig, run_markov


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; `ace-lens --help` describes it."""
    # Nothing here comes from a model hub, and a machine without a network should not wait for one.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    config = tyro.extras.subcommand_cli_from_dict(
        {"markov": MarkovConfig},
        prog="ace-lens",
        description="Find, prove and read algorithmic cores of transformers.",
        args=arguments,
    )
    # A second thread makes models of this size slower.
    torch.set_num_threads(1)
    markov(config)
