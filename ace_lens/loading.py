"""From a hub name, a folder or a GGUF file to a model with hook points, refused early where it cannot work."""

import importlib.util
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from ace_lens.models import require_differentiable

# Of what the weights take: activations and gradients need some room beside them.
_ROOM = 1.2


class LoadingError(RuntimeError):
    """A model could not be loaded; the message says why, and what to do."""


def load_model(
    spec: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    device_map: str | dict[str, str | int] | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """A causal language model as a `TransformerBridge`, in evaluation mode.

    Arguments:
        spec: a name on the Hugging Face hub (`"openai-community/gpt2"`), a folder that holds such a model, or a GGUF
            file, whose weights are dequantised.
        dtype: of the weights. By default float32 on the CPU; elsewhere the checkpoint's own, or float32 if it names
            none (a GGUF file does not).
        device: the one device that holds the model. By default a GPU if there is one.
        device_map: spreads the model over several devices: `"auto"`, or names of modules with their devices.
        trust_remote_code: run Python code that comes with the model. Never on by itself.

    Raises:
        ValueError: both `device` and `device_map` are given.
        LoadingError: there is no such model, the hub cannot be reached or asks for a login, the model brings its own
            code, a package is missing, weights are missing, or the model is too large for the memory that is free.
        TypeError: the model is not a causal language model.
    """
    # Importing TransformerLens takes seconds, which `ace-lens --help` should not.
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.utilities.devices import get_device
    from transformers import AutoConfig

    if device is not None and device_map is not None:
        raise ValueError(
            "device puts the whole model on one device, and device_map spreads it over several: give one of them."
        )
    name = os.path.expanduser(spec)
    gguf = _gguf_file(name)
    if device_map is None:
        device = device or get_device()
    places = _places(device, device_map)
    with _explained(name):
        if gguf is None:
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        else:
            config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        _require_causal_language_model(name, config)
        if dtype is None:
            own: torch.dtype | None = getattr(config, "dtype", None)
            dtype = torch.float32 if own is None or places == ["cpu"] else own
        if getattr(config, "quantization_config", None) is None:  # how much a quantised weight takes is not told
            parameters = _count_parameters(config, trust_remote_code)
            # A GGUF file is dequantised on the CPU, wherever the model goes.
            for where in [places] if gguf is None else [["cpu"], places]:
                _require_memory(name, parameters, dtype, where)
        if gguf is None:
            model = TransformerBridge.boot_transformers(
                name, dtype=dtype, device=device, device_map=device_map, trust_remote_code=trust_remote_code
            )
        else:
            model = _boot_gguf(gguf, config, dtype, device, device_map)
    require_differentiable(model)
    return model.eval()


def free_memory(place: str) -> float:
    """Bytes that are free on a device, for disk without limit."""
    if place == "disk":
        return math.inf
    if torch.device(place).type == "cuda":
        free, _ = torch.cuda.mem_get_info(place)
        # What PyTorch holds back from models that are gone can be used again.
        return free + torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
    return psutil.virtual_memory().available


def _gguf_file(name: str) -> Path | None:
    """The GGUF file that `name` stands for; None for a folder or a name on the hub.

    Raises:
        LoadingError: `name` can only be a path, and nothing lies there; a folder without a model; or the package that
            reads GGUF is not installed.
    """
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise LoadingError(
                f"The folder {name} has no config.json, so no model was saved there by save_pretrained. Give the "
                "folder that has one; for a GGUF model, give the file itself."
            )
        return None
    is_gguf = path.suffix.lower() == ".gguf"
    if not path.is_file():
        if is_gguf or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
            raise LoadingError(
                f"There is no file or folder {name} (looked from {Path.cwd()}). A model on the Hugging Face hub is "
                'named "owner/model".'
            )
        return None
    if not is_gguf:
        raise LoadingError(
            f"{name} is a file, but not a GGUF. Give a GGUF file, or the folder that holds a model's config.json."
        )
    if importlib.util.find_spec("gguf") is None:
        raise LoadingError(f"Reading {name} takes the package gguf, which is not installed: pip install gguf.")
    return path


def _places(device: str | torch.device | None, device_map: str | dict[str, str | int] | None) -> list[str]:
    """The devices that a model would lie on."""
    if device_map is None:
        return [str(device)]
    if isinstance(device_map, dict):
        named = (f"cuda:{place}" if isinstance(place, int) else str(place) for place in device_map.values())
        return sorted(set(named))
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        return [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
    return [device_map]


def _model_class(config: Any) -> Any:
    """The class in transformers that a configuration names; None for a GGUF file, or a model with code of its own."""
    import transformers

    architectures = getattr(config, "architectures", None) or [""]
    return getattr(transformers, architectures[0], None)


def _require_causal_language_model(name: str, config: Any) -> None:
    model_class = _model_class(config)
    if getattr(config, "is_encoder_decoder", False) or (model_class is not None and not model_class.can_generate()):
        raise TypeError(
            f"{name} ({config.model_type}) is not a causal language model: its logits do not predict the next token "
            "from the positions before it, which extraction relies on. Use a causal language model."
        )


def _count_parameters(config: Any, trust_remote_code: bool) -> int:
    from transformers import AutoModelForCausalLM

    model_class = _model_class(config)
    with torch.device("meta"):
        if model_class is None:
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        else:
            model = model_class(config)
    return sum(parameter.numel() for parameter in model.parameters())


def _require_memory(name: str, parameters: int, dtype: torch.dtype, places: list[str]) -> None:
    weights = parameters * dtype.itemsize
    free = sum(free_memory(place) for place in places)
    if weights * _ROOM <= free:
        return
    remedies = [
        "take a smaller model",
        "free memory that others hold",
        'spread it over several GPUs (device_map="auto")',
    ]
    if dtype.itemsize > 2:
        remedies.insert(0, "take a smaller type of number (dtype=torch.bfloat16)")
    raise LoadingError(
        f"{name} is too large for {' and '.join(places)}: {parameters / 1e9:.3g} billion parameters in {dtype} take "
        f"{weights / 1e9:.1f} GB, with room to compute {weights * _ROOM / 1e9:.1f} GB, and {free / 1e9:.1f} GB are "
        f"free. You can {', '.join(remedies[:-1])}, or {remedies[-1]}."
    )


def _boot_gguf(
    path: Path,
    config: Any,
    dtype: torch.dtype,
    device: str | torch.device | None,
    device_map: str | dict[str, str | int] | None,
) -> Any:
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        config=config,
        dtype=dtype,
        device_map=device_map,
        attn_implementation="eager",  # what TransformerLens asks for, so that attention has hook points
        output_loading_info=True,
    )
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        # Transformers would draw them at random.
        raise LoadingError(
            f"{path} lacks {len(missing)} of the model's weights, the first {missing[0]}. If it is one part of a "
            "split file, join the parts first (llama-gguf-split --merge)."
        )
    if device is not None:
        model = model.to(device)
    # Not every architecture is named in the file, and TransformerLens chooses its adapter by that name.
    model.config.architectures = [type(model).__name__]
    return TransformerBridge.boot_transformers(
        path.stem, hf_model=model, tokenizer=tokenizer, dtype=dtype, device=device
    )


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Say in plain words why a model could not be had from the hub, and what to do."""
    try:
        yield
    except (OSError, ValueError) as error:
        if reason := _reason(name, error):
            raise LoadingError(reason) from error
        raise


def _reason(name: str, error: BaseException) -> str | None:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    causes = [error]
    while following := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(following)

    def caused_by(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in causes)

    page = f"https://huggingface.co/{name}"
    if caused_by(GatedRepoError):
        return (
            f"{name} is gated: its owners give it to those who accept their terms. Accept them at {page}, then log in "
            "on this machine (hf auth login)."
        )
    if caused_by(RepositoryNotFoundError):
        return (
            f"There is no model {name} on the Hugging Face hub, or it is private; nor is there a folder of that name. "
            "Check the spelling at https://huggingface.co/models; for a private model, log in (hf auth login)."
        )
    # Of a model that is only half here, transformers says offline that the other half does not exist.
    half_here = constants.HF_HUB_OFFLINE and isinstance(error, OSError) and not Path(name).exists()
    if half_here or caused_by(LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError):
        if constants.HF_HUB_OFFLINE:
            return (
                f"{name} is not (all) on this machine, and HF_HUB_OFFLINE keeps it from being downloaded. Unset that "
                "variable and start again, or download the model elsewhere (hf download) and give its folder."
            )
        return (
            f"{name} is not (all) on this machine, and the Hugging Face hub cannot be reached. Check the network, or "
            "download the model elsewhere (hf download) and give its folder."
        )
    if "trust_remote_code" in str(error):
        where = name if Path(name).is_dir() else page
        return (
            f"{name} brings Python code of its own, which loading would run on this machine with your rights. Read it "
            f"at {where}; if you trust it, load with trust_remote_code=True."
        )
    return None
