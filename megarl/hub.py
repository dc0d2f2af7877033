"""Finds the local folder of a HF checkpoint; a hub name is downloaded."""

from __future__ import annotations

from pathlib import Path

import httpx
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

from megarl.knobs import UserError

HUB_TIMEOUT_S = 10.0
CHECKPOINT_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.tiktoken", "*.txt", "*.jinja"]


def local_folder(path: str) -> Path:
    """Returns the folder of a HF checkpoint, given a local folder or a hub name. Downloads what is not cached.

    Raises:
        UserError: no such folder, or the hub cannot be reached.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file() and (folder / "adapter_config.json").is_file():
            raise UserError(
                f"actor.path={path} holds adapters and no model; merge them: python -m megarl.export checkpoint=RUN "
                "output=DIR merge=true"
            )
        if not (folder / "config.json").is_file():
            exported = (folder / "hf" / "config.json").is_file()  # in the folder of a run
            remedy = f"give its final model, {folder / 'hf'}" if exported else "give the folder of a HF checkpoint"
            raise UserError(f"actor.path={path} holds no config.json; {remedy}")
        return folder
    if folder.is_absolute() or path.startswith(".") or len(folder.parts) != 2:
        raise UserError(f"actor.path={path} is not a folder; give a local HF checkpoint or a hub name 'org/name'")
    try:
        HfApi().model_info(path, timeout=HUB_TIMEOUT_S)
        online = True
    except (HfHubHTTPError, OfflineModeIsEnabled, httpx.TransportError) as error:
        online, reason = False, str(error).strip().splitlines()[0] or type(error).__name__
    try:
        return Path(snapshot_download(path, allow_patterns=CHECKPOINT_FILES, local_files_only=not online))
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx.TransportError, OSError, ValueError) as error:
        failure = str(error).strip().splitlines()[0] if online else reason
        raise UserError(
            f"actor.path={path} is not a local folder and could not be fetched from the hub ({failure}); offline, "
            "give a local HF checkpoint: actor.path=DIR"
        ) from error
