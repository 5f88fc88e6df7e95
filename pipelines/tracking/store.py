"""The connection to a tracking store: time limits, addresses without secrets, and which errors mean what.

A store that cannot exist (an unknown scheme, a missing driver, a file that is no database) is the user's mistake and
an InputError. A store that does not answer is nobody's: TrackingUnreachable, and training goes on.
"""

import logging
import os
from pathlib import Path

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # a server that is not there is said within seconds
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")

from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import ArgumentError, DatabaseError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from pipelines.credentials import censored, without_credentials
from trm_repro.config import RunConfig
from trm_repro.errors import InputError
from trm_repro.file_locks import file_lock

SQLITE_HEADER = b"SQLite format 3\x00"
STORE_ERRORS = (MlflowException, SQLAlchemyError, ModuleNotFoundError, OSError, ValueError)  # the last: bad MLFLOW_*
HTTP_SCHEMES = ("http://", "https://")
SQLITE_SCHEME = "sqlite:///"
REJECTIONS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")

for name in ("alembic", "mlflow", "mlflow.store.db.utils", "sqlalchemy", "urllib3.connectionpool"):
    logging.getLogger(name).setLevel(logging.ERROR)


class TrackingUnreachable(Exception):  # noqa: N818 - a state of the world, met by waiting
    """MLflow does not answer, or not as MLflow does; points wait in the spool."""


def tracking_uri(config: RunConfig) -> str:
    """Return the tracking URI: the configured one, or SQLite in the output folder."""
    if config.tracking.uri is not None:
        return config.tracking.uri
    return f"sqlite:///{(Path(config.output.dir) / 'mlflow.db').resolve()}"


def connect(uri: str) -> MlflowClient:
    """Make a client; a server is not asked anything yet.

    Raises:
        InputError: if no store can have this URI.
        TrackingUnreachable: if a database does not answer.
    """
    try:
        return MlflowClient(tracking_uri=uri)
    except (ModuleNotFoundError, ArgumentError, NoSuchModuleError) as error:
        raise InputError(
            f"tracking.uri={without_credentials(uri)}: MLflow cannot use it ({reason(error, uri)})"
        ) from None
    except MlflowException as error:
        if isinstance(error.__cause__ or error.__context__, DatabaseError):
            raise TrackingUnreachable(reason(error, uri)) from None
        raise InputError(
            f"tracking.uri={without_credentials(uri)}: MLflow cannot use it ({reason(error, uri)})"
        ) from None
    except (SQLAlchemyError, OSError) as error:
        raise TrackingUnreachable(reason(error, uri)) from None


def ensure_sqlite_store(path: Path) -> None:
    """Make the SQLite store whole or not at all: MLflow killed while it makes its tables leaves a file it cannot use.

    Args:
        path: the database.

    Raises:
        InputError: if something that is no database is in the way.
    """
    with file_lock(path.with_name("mlflow.lock")):
        if path.is_file():
            with path.open("rb") as file:
                header = file.read(len(SQLITE_HEADER))
            if header and header != SQLITE_HEADER:
                raise InputError(f"{path}: is no SQLite database; move it away, it is filled again from metrics.jsonl")
            if header:
                return
            path.unlink()
        if path.exists():
            raise InputError(f"{path}: is in the way of MLflow's database; move it away")
        partial = path.with_name(f"{path.name}.partial")
        partial.unlink(missing_ok=True)
        MlflowClient(tracking_uri=f"sqlite:///{partial.resolve()}").search_experiments(max_results=1)
        os.replace(partial, path)


def reason(error: BaseException, uri: str) -> str:
    """Say why in one line, in a database's own words, without what the URI holds of user names and passwords."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, DBAPIError):
        cause = cause.__cause__ or cause.__context__
    told = error if cause is None or cause.orig is None else cause.orig
    line = (str(told).splitlines() or [""])[0].strip() or type(error).__name__
    return censored(line, uri)[:200]


def how_to_browse(uri: str) -> str:
    """Return the address of the server, or the command that serves a database on this machine only."""
    public = without_credentials(uri)
    return public if public.startswith(HTTP_SCHEMES) else f"mlflow ui --host 127.0.0.1 --backend-store-uri {public}"


def is_rejection(error: BaseException) -> bool:
    """Whether MLflow answered and refused what it was sent; sending it again would not help."""
    return isinstance(error, MlflowException) and error.error_code in REJECTIONS


def check_store(uri: str) -> None:
    """Check that a store that is only read from is there: SQLite would make an empty one.

    Raises:
        InputError: if the URI names an SQLite file that is not there.
    """
    database = Path(uri.removeprefix(SQLITE_SCHEME))
    if uri.startswith(SQLITE_SCHEME) and not database.is_file():
        raise InputError(f"{database}: no such file; run trm-repro reproduce first, or name a store by its URI")
