"""ModelSpec from a Hugging Face config.

The config classes of Transformers 5 import torch, so config.json is read as it is; a field that it leaves out takes the
default of its model type, from the tables in `families`. Parameters are counted by formula.

Promise: `parameters` plus `unused_parameters` are those of the model that Transformers builds from the same config,
each tied one once. Unused is what no path to the loss touches: layers behind the features that a projector takes, a
norm or pooling head whose result is thrown away. A config of an unknown type raises; nothing is guessed.
Price: about a millisecond, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from entrain_opt.spec.families import FAMILIES
from entrain_opt.spec.families.fields import unknown
from entrain_opt.spec.folder import find_model_folder, read_json
from entrain_opt.spec.model import TOWER_PARTS, ModelSpec, ModuleSpec, check_frozen


def read_model_spec(folder: str | Path, *, frozen: Sequence[str] = ()) -> ModelSpec:
    """The spec of a Hugging Face folder or cached hub id.

    Args:
        folder: with config.json.
        frozen: parts that do not train, from `FREEZABLE_PARTS`.

    Raises:
        RuntimeConfigError: no config, an unknown family, a field without sense, or a frozen part that is misspelled or
            that the model does not have.
    """
    check_frozen(frozen)
    path = find_model_folder(folder)
    config = read_json(path / "config.json")
    where = f"{path}/config.json"
    family = config.get("model_type")
    if family not in FAMILIES:
        write = "a reader of its config in entrain_opt/spec/families/"
        raise unknown(f"{where}: model_type", FAMILIES, family, write=write)
    parts = FAMILIES[family](config, where)
    towers = [TOWER_PARTS[encoder.name] for encoder in parts.encoders]
    check_frozen(frozen, (*towers, *(["projector"] if towers else []), "language_model"))
    llm = parts.text.module
    return ModelSpec(
        name=path.name if Path(folder).is_dir() else str(folder),
        family=family,
        encoders=tuple(_freeze_encoder(encoder, frozen) for encoder in parts.encoders),
        llm=replace(
            llm,
            # A tied head is the embedding, which counts at the input.
            output_parameters=llm.output_parameters - (llm.input_parameters if parts.tied else 0),
            trained="language_model" not in frozen,
            output_trained="language_model" not in frozen,
        ),
        max_tokens=parts.text.max_tokens,
        tied_embeddings=parts.tied,
    )


def _freeze_encoder(encoder: ModuleSpec, frozen: Sequence[str]) -> ModuleSpec:
    return replace(encoder, trained=TOWER_PARTS[encoder.name] not in frozen, output_trained="projector" not in frozen)
