"""Find, prove and steer algorithmic cores of transformers, in any TransformerLens session.

The road, each step a module: samples -> targets -> core -> hooks -> probe -> extraction -> validation -> controls ->
identification -> comparison -> transplant -> discovery,
trajectory.
"""

from ace_lens.comparison import (
    RankCorrelation,
    canonical_correlation_p_values,
    canonical_correlations,
    consensus_cores,
    linear_cka,
    overlap,
    principal_angles,
    spearman,
    weight_cosine,
)
from ace_lens.controls import (
    ControlRow,
    Controls,
    compare_with_controls,
)
from ace_lens.core import Core, Provenance
from ace_lens.discovery import Proof, find_core
from ace_lens.downstream import EditedOutputs, PausedPass, edited_outputs, paused_passes
from ace_lens.extraction import CoreExtractor, core_extractors, extract_core, extract_cores
from ace_lens.hooks import CoordinateSetter, CoreHook, CoreIntervention, ProjectionAblator, SignFlipSteerer
from ace_lens.identification import (
    LinearOperator,
    eigenvalue_intervals,
    fit_cycle,
    fit_operator,
    fourier_power,
    match_eigenvalues,
    oracle_r2,
    spectrum_p_value,
)
from ace_lens.layers import LayerSweep, crossfit_layers, sweep_layers
from ace_lens.loading import LoadingError, load_model
from ace_lens.models import HookedModel, attached
from ace_lens.plots import plot_controls, plot_validation
from ace_lens.positions import Positions
from ace_lens.probe import JacobianProbe, Probed
from ace_lens.samples import Samples
from ace_lens.scores import ACCURACY, CROSS_ENTROPY, KL, MEAN_MARGIN, ROC_AUC, Score
from ace_lens.steering import Steer, adaptive_flip, band_flip, generate_steered, plain_flip, smallest_flips
from ace_lens.targets import CentredLogits, LogitMargin, Target
from ace_lens.trajectory import Trajectory, TrajectoryPoint, models_in, track_core
from ace_lens.transplant import Transplant, transplant
from ace_lens.validation import Estimate, Validation, text_perplexity, validate

__all__ = [
    "ACCURACY",
    "CROSS_ENTROPY",
    "KL",
    "MEAN_MARGIN",
    "ROC_AUC",
    "CentredLogits",
    "ControlRow",
    "Controls",
    "CoordinateSetter",
    "Core",
    "CoreExtractor",
    "CoreHook",
    "CoreIntervention",
    "EditedOutputs",
    "Estimate",
    "HookedModel",
    "JacobianProbe",
    "LayerSweep",
    "LinearOperator",
    "LoadingError",
    "LogitMargin",
    "PausedPass",
    "Positions",
    "Probed",
    "ProjectionAblator",
    "Proof",
    "Provenance",
    "RankCorrelation",
    "Samples",
    "Score",
    "SignFlipSteerer",
    "Steer",
    "Target",
    "Trajectory",
    "TrajectoryPoint",
    "Transplant",
    "Validation",
    "adaptive_flip",
    "attached",
    "band_flip",
    "canonical_correlation_p_values",
    "canonical_correlations",
    "compare_with_controls",
    "consensus_cores",
    "core_extractors",
    "crossfit_layers",
    "edited_outputs",
    "eigenvalue_intervals",
    "extract_core",
    "extract_cores",
    "find_core",
    "fit_cycle",
    "fit_operator",
    "fourier_power",
    "generate_steered",
    "linear_cka",
    "load_model",
    "match_eigenvalues",
    "models_in",
    "oracle_r2",
    "overlap",
    "paused_passes",
    "plain_flip",
    "plot_controls",
    "plot_validation",
    "principal_angles",
    "smallest_flips",
    "spearman",
    "spectrum_p_value",
    "sweep_layers",
    "text_perplexity",
    "track_core",
    "transplant",
    "validate",
    "weight_cosine",
]
