"""Import of NIXL at its first use, without its changes to logging and standard output."""

import importlib
import logging
import logging.config
import os
import threading
from typing import Any

from kvxfer.errors import BackendUnavailableError
from kvxfer.text import printable

ENVIRONMENT = {
    "UCX_MODULES": "^efa",
    "UCX_LOG_FILE": "stderr",
    "UCX_DEBUG_SIGNO": "0",
    "NIXL_LOG_LEVEL": "WARN",
}
"""Environment variables that are set before the import, unless the user has set them.

UCX's EFA module crashes processes at their exit: it brings a second copy of libibverbs along.
UCX's log goes to standard output otherwise. With a number of a signal, SIGHUP by default, UCX takes
that from the process and logs every message from the first one on.
"""

_importing = threading.Lock()


def import_nixl(*, otherwise: str) -> Any:
    """Import NIXL; blocks for up to a second the first time.

    NIXL configures logging anew when it is imported: that would close the application's handlers,
    silence errors of its logging, and write messages to standard output. None of it happens; what
    NIXL logs in Python goes where the application's messages go.

    Raises:
        BackendUnavailableError: It cannot be imported; `otherwise` is advice for the user.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with _importing:
        raise_exceptions, configure = logging.raiseExceptions, logging.config.dictConfig

        def configure_others(config: Any) -> None:
            if set(config.get("loggers", ())) != {"nixl"}:
                configure(config)

        logging.config.dictConfig = configure_others
        try:
            return importlib.import_module("nixl")
        except Exception as exc:  # a broken wheel raises what it likes
            reason, _, _ = printable(str(exc) or type(exc).__name__).partition("\\n")
            advice = f"install nixl, or {otherwise}"
            raise BackendUnavailableError(f"NIXL cannot be imported ({reason}); {advice}") from exc
        finally:
            logging.config.dictConfig = configure
            logging.raiseExceptions = raise_exceptions


def nixl_errors(nixl: Any) -> tuple[type[Exception], ...]:
    """List the exceptions that NIXL's calls raise; they have no base class of their own."""
    named = (error for name, error in vars(nixl).items() if name.endswith("Error"))
    return (RuntimeError, *named)
