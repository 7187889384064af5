"""Find out in seconds whether the Hugging Face hub has a model.

Libraries would try every file of it, several times each.
"""

from __future__ import annotations

import logging
import os
import threading
from functools import cache

from kvgraft.errors import ConfigError, one_line

logger = logging.getLogger(__name__)

HUB_DEADLINE_S = 5.0
"""How long the hub may take to say whether it has a model."""
_FILE = "config.json"
_REMEDY = "give the path of a local directory, or set HF_HUB_OFFLINE=1 where the model is in the cache"


class HubUnreachableError(ConfigError):
    """The hub did not answer, or not in time."""


@cache
def require_on_hub(name: str) -> None:
    """Ask the hub for a model; where it does not answer and the cache has the model, nothing more is asked of it.

    Asks once per process.

    Raises:
        ConfigError: There is no such model, it needs a login, or the hub does not answer in `HUB_DEADLINE_S`.
    """
    try:
        from huggingface_hub import constants, try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return  # who loads the model says what is missing
    try:
        is_cached = isinstance(try_to_load_from_cache(name, _FILE), str)
    except HFValidationError as error:
        raise ConfigError(
            f"{name!r} names no model and no folder here; give a directory, a GGUF file or a hub id such as ORG/NAME"
        ) from error
    if constants.HF_HUB_OFFLINE:
        if not is_cached:
            raise ConfigError(
                f"{_no_folder(name)}model {name} is not in the cache and HF_HUB_OFFLINE is set; unset it, or give the path "
                "of a local directory"
            )
        return
    failure = _asked(name)
    if failure is None:
        return
    if not is_cached or not isinstance(failure, HubUnreachableError):
        raise failure
    logger.warning("%s; what the cache has of it is used", failure)
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True


def _asked(name: str) -> ConfigError | None:
    """Ask in a thread: neither the look-up of a name nor what libraries retry has a deadline of its own."""
    answers: list[ConfigError | None] = []
    thread = threading.Thread(target=lambda: answers.append(_ask(name)), daemon=True)
    thread.start()
    thread.join(HUB_DEADLINE_S)
    return answers[0] if answers else _unreachable(name, f"no answer in {HUB_DEADLINE_S:.0f} s")


def _ask(name: str) -> ConfigError | None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

    try:
        get_hf_file_metadata(hf_hub_url(name, _FILE), timeout=HUB_DEADLINE_S)
    except GatedRepoError:
        return ConfigError(f"model {name} needs a login that may read it; run `hf auth login` or set HF_TOKEN")
    except RepositoryNotFoundError:
        return ConfigError(
            f"{_no_folder(name)}the hub has no model {name} that you may read; check its name, or set HF_TOKEN"
        )
    except EntryNotFoundError:
        return ConfigError(f"model {name} of the hub has no {_FILE}; choose one for transformers")
    except Exception as error:  # noqa: BLE001 - libraries beneath have errors of their own
        return _unreachable(name, one_line(error))
    return None


def _unreachable(name: str, reason: str) -> ConfigError:
    return HubUnreachableError(f"{_no_folder(name)}the hub cannot be asked for model {name} ({reason}); {_REMEDY}")


def _no_folder(name: str) -> str:
    """Beginning of messages, for users who meant a path: `models/mine` looks like a hub id, too."""
    return f"there is no folder {name} here, and "
