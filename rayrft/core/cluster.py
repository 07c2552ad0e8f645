"""Connection to a Ray cluster, with its authentication token."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import stat
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rayrft.core.placement import NAMESPACE
from rayrft.errors import ClusterError

if TYPE_CHECKING:
    from ray._private.worker import BaseContext

_CONNECT_TIMEOUT_S = 5.0
"""Time for a cluster to answer; Ray itself tries for two minutes."""


def connect(*, start: bool = True) -> None:
    """Connect to the cluster at RAY_ADDRESS or, if unset, to one on this machine; else start one for this process.

    On this machine the cluster of the latest `ray start` is used; with ``start=False`` also another, if it is the only
    one. Raises ClusterError, within seconds, if nothing answers at RAY_ADDRESS, if the cluster rejects this process'
    token, or if ``start=False`` and there is no cluster or more than one.
    """
    import ray

    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    address = os.environ.get("RAY_ADDRESS", "")
    if address not in ("", "auto", "local"):
        _check_address(address)
    else:
        address = "" if address == "local" else _on_this_machine(any_one=not start)
    if address:
        _init(address)
    elif start:
        _start_local()
    else:
        raise ClusterError(
            "no Ray cluster runs on this machine", remedy="set RAY_ADDRESS to the address of the run's cluster"
        )


def _init(address: str) -> BaseContext:
    import ray

    # Ray passes this to a shell unquoted, for workers with a runtime environment, such as Ray Train's.
    python = shlex.quote(sys.executable)
    environment = None if python == sys.executable else {"py_executable": python}
    return ray.init(
        address=address, namespace=NAMESPACE, runtime_env=environment, log_to_driver=False, logging_level="ERROR"
    )


def _start_local() -> None:
    """Start a cluster that ends with this process, on free ports."""
    ensure_token()
    context = _init("local")
    print(
        f"started a Ray for this process: RAY_ADDRESS={context.address_info['gcs_address']} for other terminals, "
        f"dashboard {context.dashboard_url}",
        file=sys.stderr,
        flush=True,
    )


def _check_address(address: str) -> None:
    """Raise ClusterError, within seconds, unless the cluster with its head at ``host:port`` accepts our token."""
    use_token()
    if refusal := _refusal(address):
        raise ClusterError(
            refusal,
            field="RAY_ADDRESS",
            value=address,
            remedy="set it to host:port of a running Ray cluster, or unset it to use one on this machine",
        )


def _refusal(address: str) -> str | None:
    """Return why the cluster at ``address`` cannot be used; None if it can."""
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated.gcs_service_pb2 import CheckAliveRequest
    from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub
    from ray.exceptions import AuthenticationError

    if "://" in address:
        return "runs are started on the cluster itself, at host:port of its head node; from outside: ray job submit"
    with init_grpc_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            NodeInfoGcsServiceStub(channel).CheckAlive(CheckAliveRequest(), timeout=_CONNECT_TIMEOUT_S)
        except AuthenticationError:
            return "RAY_AUTH_MODE requires a token, and there is none (RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token)"
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                return "the cluster rejects the token of this process (RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token)"
            return "no Ray cluster answers there"
    return None


def _on_this_machine(*, any_one: bool) -> str:
    """Return the address of the latest `ray start` or, with ``any_one``, of the only other cluster that accepts our
    token; "" if there is none."""
    from ray._private.services import find_gcs_addresses
    from ray._private.utils import read_ray_address

    use_token()
    if (latest := read_ray_address()) and _refusal(latest) is None:
        return latest
    found = [address for address in sorted(find_gcs_addresses()) if _refusal(address) is None] if any_one else []
    if len(found) > 1:
        raise ClusterError("several Ray clusters run on this machine", value=found, remedy="set RAY_ADDRESS to one")
    return found[0] if found else ""


def ensure_token() -> None:
    """Create Ray's authentication token if authentication is on and there is none, and print its path.

    Ray reads RAY_AUTH_TOKEN, else the file RAY_AUTH_TOKEN_PATH, else ``~/.ray/auth_token``; `ray.init` creates the last
    one, `ray start` does not. If the home folder is not writable, the token is stored in a temporary folder of this
    user, and RAY_AUTH_TOKEN_PATH is set to it for this process and its children.

    Raises ClusterError if it cannot be written anywhere.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or _find_token():
        return
    for path in _token_files():
        try:
            _write_token(path)
        except OSError:
            continue
        print(f"created Ray's authentication token: {path}", file=sys.stderr, flush=True)
        _find_token()
        return
    raise ClusterError(
        "Ray's authentication token cannot be written",
        field="RAY_AUTH_TOKEN_PATH",
        value=[str(path) for path in _token_files()],
        remedy="set it to a writable file, or set RAY_AUTH_MODE=disabled",
    )


def use_token() -> None:
    """Send our token, if there is one, to a running cluster; Ray does not do so when given an address."""
    if "RAY_AUTH_MODE" not in os.environ and _find_token():
        from ray._private.authentication.authentication_token_setup import _enable_token_auth

        _enable_token_auth()


def _find_token() -> bool:
    """Return whether there is a token; set RAY_AUTH_TOKEN_PATH to one that Ray would not find itself."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return True
    for path in _token_files():
        with contextlib.suppress(OSError):
            if path.read_text().strip():
                if path != _home_file():
                    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)
                return True
    return False


def _token_files() -> list[Path]:
    """Return the files that may hold a token, by precedence."""
    if named := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return [Path(named)]
    home, own = _home_file(), Path(tempfile.gettempdir(), f"rayrft-{os.getuid()}")
    files = [] if home is None else [home]
    # The temporary folder is shared: use a subfolder only if no other user can read it.
    with contextlib.suppress(FileNotFoundError):
        found = own.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            return files
    return [*files, own / "auth_token"]


def _home_file() -> Path | None:
    home = os.path.expanduser("~")
    return Path(home, ".ray", "auth_token") if os.path.isabs(home) else None


def _write_token(path: Path) -> None:
    """Write a token atomically, readable by this user only; of concurrent writers the first one wins."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.exists():  # an empty file: `_find_token` skipped it
        path.unlink()
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:
        file.write(secrets.token_hex(32))
        file.flush()
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)
