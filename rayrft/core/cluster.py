"""The Ray cluster that a process works on: whether one answers, and the token that it asks for."""

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

_PATIENCE_S = 5.0
"""Within this a cluster answers, or does not. Ray itself tries for two minutes."""


def connect(*, start: bool = True) -> None:
    """Connect to the cluster of RAY_ADDRESS or, without it, to one on this machine; else start one for this process.

    On this machine it is that of the latest `ray start`; with ``start=False`` any other, too, if there is only one.

    Raises ClusterError, within seconds, where nothing answers at RAY_ADDRESS, where it refuses this process' token, or
    where ``start=False`` and there is no cluster, or more than one.
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
            "no Ray cluster runs on this machine", remedy="give the address of the run's cluster in RAY_ADDRESS"
        )


def _init(address: str) -> BaseContext:
    import ray

    # Ray gives this to a shell as it is, for workers with an environment of their own, such as Ray Train's.
    python = shlex.quote(sys.executable)
    environment = None if python == sys.executable else {"py_executable": python}
    return ray.init(
        address=address, namespace=NAMESPACE, runtime_env=environment, log_to_driver=False, logging_level="ERROR"
    )


def _start_local() -> None:
    """Start a cluster that ends with this process, on ports that are free, whatever else runs on this machine."""
    ensure_token()
    context = _init("local")
    print(
        f"started a Ray for this process: RAY_ADDRESS={context.address_info['gcs_address']} for other terminals, "
        f"dashboard {context.dashboard_url}",
        file=sys.stderr,
        flush=True,
    )


def _check_address(address: str) -> None:
    """Raise ClusterError, within seconds, unless a cluster answers at ``host:port`` of its head and takes our token."""
    use_token()
    if refusal := _refusal(address):
        raise ClusterError(
            refusal,
            field="RAY_ADDRESS",
            value=address,
            remedy="give host:port of a Ray that runs, or unset it to use one on this machine",
        )


def _refusal(address: str) -> str | None:
    """Why no cluster can be worked on there; None where one can."""
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated.gcs_service_pb2 import CheckAliveRequest
    from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub
    from ray.exceptions import AuthenticationError

    if "://" in address:
        return "runs are started on the cluster itself, at host:port of its head node; from outside: ray job submit"
    with init_grpc_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            NodeInfoGcsServiceStub(channel).CheckAlive(CheckAliveRequest(), timeout=_PATIENCE_S)
        except AuthenticationError:
            return "RAY_AUTH_MODE asks for a token, and there is none (RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token)"
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                return "the Ray there refuses the token of this process (RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token)"
            return "no Ray answers there"
    return None


def _on_this_machine(*, any_one: bool) -> str:
    """The cluster of the latest `ray start` or, with ``any_one``, the only other; "" where none takes our token."""
    from ray._private.services import find_gcs_addresses
    from ray._private.utils import read_ray_address

    use_token()
    if (latest := read_ray_address()) and _refusal(latest) is None:
        return latest
    found = [each for each in sorted(find_gcs_addresses()) if _refusal(each) is None] if any_one else []
    if len(found) > 1:
        raise ClusterError("several Ray clusters run on this machine", value=found, remedy="set RAY_ADDRESS to one")
    return found[0] if found else ""


def ensure_token() -> None:
    """Make Ray's authentication token where authentication is on and there is none, and say where it lies.

    Ray takes RAY_AUTH_TOKEN, else the file RAY_AUTH_TOKEN_PATH, else ``~/.ray/auth_token``; `ray.init` makes the last
    by itself, `ray start` none. Where the home folder cannot be written, the token goes into a folder of this user
    among the temporary files, and RAY_AUTH_TOKEN_PATH names it for this process and those it starts.

    Raises ClusterError where it can be written nowhere.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or _find_token():
        return
    for path in _token_files():
        try:
            _write_token(path)
        except OSError:
            continue
        print(f"made Ray's authentication token: {path}", file=sys.stderr, flush=True)
        _find_token()
        return
    raise ClusterError(
        "Ray's authentication token cannot be written",
        field="RAY_AUTH_TOKEN_PATH",
        value=[str(path) for path in _token_files()],
        remedy="name a file that can be, or set RAY_AUTH_MODE=disabled",
    )


def use_token() -> None:
    """Show our token, if there is one, to a cluster that runs already: for an address that it is given Ray does not."""
    if "RAY_AUTH_MODE" not in os.environ and _find_token():
        from ray._private.authentication.authentication_token_setup import _enable_token_auth

        _enable_token_auth()


def _find_token() -> bool:
    """Whether there is a token; one that Ray would not find by itself is named to it."""
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
    """Where a token may lie, the first place first."""
    if named := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return [Path(named)]
    home, own = _home_file(), Path(tempfile.gettempdir(), f"rayrft-{os.getuid()}")
    files = [] if home is None else [home]
    # Among the temporary files of others only a folder that nobody else can look into.
    with contextlib.suppress(FileNotFoundError):
        found = own.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            return files
    return [*files, own / "auth_token"]


def _home_file() -> Path | None:
    home = os.path.expanduser("~")
    return Path(home, ".ray", "auth_token") if os.path.isabs(home) else None


def _write_token(path: Path) -> None:
    """Readable for this user alone, whole or not at all; of two who write at once the first one's stays."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.exists():  # empty, or it would have been found
        path.unlink()
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:
        file.write(secrets.token_hex(32))
        file.flush()
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)
