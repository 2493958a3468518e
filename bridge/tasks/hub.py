"""Where a public data set lies: a path, or the copy of a hub's data set on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bridge.config.tasks import FileTask
from bridge.errors import UserError
from bridge.tasks.files import FORMS, files_digest, pools

if TYPE_CHECKING:
    from bridge.tasks.public import PublicTask


def locate(settings: FileTask, task: PublicTask[FileTask]) -> FileTask:
    """The settings with an absolute path and the digest of the files there.

    Raises UserError if there are none, or not those that `sha256` names.
    """
    what = f"task {settings.name}: path: {settings.path}"
    root = Path(settings.path).expanduser().absolute()
    if not root.exists():
        if settings.path.count("/") != 1 or settings.path.startswith((".", "~", "/")):
            raise UserError(
                f"{what}: there is no such file or folder ({root}); docs/tasks.md says where the data come from"
            )
        root = hub_folder(settings.path, what)
    found = pools(root, task.variants, task.variant)
    digest = files_digest(root, found)
    if settings.sha256 not in (None, digest):
        raise UserError(f"{what}: the data are not those that sha256 names, but {digest}")
    return settings.model_copy(update={"path": str(root), "sha256": digest})


def hub_folder(name: str, what: str) -> Path:
    """The folder of a hub's data set in the cache of huggingface_hub, downloaded if it is not there.

    Raises UserError, beginning with `what`, where that cannot be done.
    """
    remedy = "give the path of a copy, or download it where there is a network (docs/tasks.md)"
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise UserError(
            f"{what}: is no path here, and a hub name needs the package huggingface_hub; {remedy}"
        ) from None
    patterns = [f"*{form}" for form in FORMS]
    try:
        return Path(snapshot_download(name, repo_type="dataset", local_files_only=True))
    except HFValidationError:
        raise UserError(f"{what}: is neither a path here nor a hub name (OWNER/NAME)") from None
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{what}: is no path here, not in the hub's cache, and cannot be downloaded ({reason}); {remedy}"
        ) from None
