"""Models on the Hugging Face Hub: `user/name` is downloaded once, and uploaded whole."""

import re
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)


def is_repository(name: str) -> bool:
    """Whether a name has the form `user/name` of a repository."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None


def download(repository: str) -> Path:
    """Return the local folder of a repository, as it is now, or as last seen when offline.

    Raises:
        FileNotFoundError: there is none, or it cannot be reached; says which in one line.
    """
    try:
        return Path(snapshot_download(repository))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"on the Hugging Face Hub: {_reason(error)}") from None


def upload(folder: Path, repository: str, private: bool | None, token: str | None) -> str:
    """Put a folder into a repository, made if there is none, in one commit; returns its address.

    Raises:
        OSError: the Hub refuses, or cannot be reached; says why in one line.
    """
    api = HfApi(token=token)
    try:
        url = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=url.repo_id, folder_path=folder, commit_message="World model by diagd"
        )
    except (OSError, ValueError) as error:
        raise OSError(f"{repository} cannot be uploaded: {_reason(error)}") from None
    return str(url)


def _reason(error: Exception) -> str:
    if isinstance(error, GatedRepoError):
        return "its owner wants you to ask first, on its page"
    if isinstance(error, RepositoryNotFoundError):
        return "no such model, or a private one (hf auth login)"
    if isinstance(error, LocalEntryNotFoundError):
        return "it cannot be reached, and the model was not downloaded before"
    return str(error).strip().split("\n")[0]
